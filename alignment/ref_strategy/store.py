"""Log-probs on disk: shards that are whole or ignored, found by what would change their values."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load, save
from torch import Tensor, nn

from alignment.batch import Example
from alignment.model.cache import cache_root

log = logging.getLogger("alignment")
KEY_BYTES = 16


def example_key(example: Example) -> bytes:
    """16 bytes of the example's tokens: a changed template, tokenizer or truncation is another example."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for ids in (example.prompt_ids, *example.completions):
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(b"".join(token.to_bytes(4, "little") for token in ids))
    return digest.digest()


def fingerprint(model: nn.Module) -> str:
    """Hash of the frozen weights, so that no name, path or date can make a stale value look right."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for name, value in sorted(model.state_dict().items()):
        if "lora_" in name and ".default." in name and not _frozen_adapter(model):
            continue  # the trained adapter is switched off in the reference
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _frozen_adapter(model: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())


class LogprobStore:
    """A folder of shards under one key. Each shard carries a checksum; a damaged one is dropped and computed again."""

    def __init__(self, folder: str | None, key: dict[str, Any]) -> None:
        root = Path(folder).expanduser() if folder else cache_root() / "reference"
        text = json.dumps(key, sort_keys=True)
        self.folder = root / hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()
        self._description = text

    def lock(self) -> FileLock:
        """Held while reading and computing, so that jobs that start together pay for one pass."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / "lock")

    def read(self, wanted: Iterable[bytes]) -> dict[bytes, Tensor]:
        """Stored values of the wanted examples."""
        wanted, found = set(wanted), {}
        for path in sorted(self.folder.glob("*.shard")):
            found |= {key: value for key, value in _read_shard(path).items() if key in wanted}
        return found

    def write(self, values: dict[bytes, Tensor]) -> None:
        """Add a shard. Where the disk refuses, training goes on: the values are in memory."""
        if not values:
            return
        path = self.folder / f"{uuid.uuid4().hex}.shard"
        partial = path.with_suffix(".partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "key.json").write_text(self._description)
            with open(partial, "wb") as file:
                file.write(_pack(values))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            log.warning("reference cache: %s could not be written (%s); this run goes on without it", path, error)
            partial.unlink(missing_ok=True)


def _pack(values: dict[bytes, Tensor]) -> bytes:
    keys = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8)
    lengths = torch.tensor([len(value) for value in values.values()])
    payload = save({"keys": keys, "lengths": lengths, "values": torch.cat(list(values.values())).float()})
    return hashlib.sha256(payload).digest() + payload


def _read_shard(path: Path) -> dict[bytes, Tensor]:
    content = path.read_bytes()
    checksum, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != checksum:
        log.warning("reference cache: %s is damaged; it is removed and its examples are computed again", path)
        path.unlink(missing_ok=True)
        return {}
    tensors = load(payload)
    keys = bytes(tensors["keys"].tolist())
    parts = tensors["values"].split(tensors["lengths"].tolist())
    return {keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]: part for i, part in enumerate(parts)}
