"""Where prepared examples are kept, under a key of everything that changes them."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from alignment.data.split import content_hash
from alignment.data.store import Damaged, ExampleFile
from alignment.model.cache import build_once, cache_root

log = logging.getLogger("alignment")


def folder_of(key: Mapping[str, Any]) -> Path:
    return cache_root() / "examples" / content_hash(dict(key))


@functools.cache
def code_version() -> dict[str, str]:
    """What turns rows into tokens: this package's own files, and the libraries."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    names = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")
    return {"code": digest.hexdigest()} | {name: version(name) for name in names}


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that a tokenizer would save: its vocabulary, chat template, special tokens and options."""
    tokenizer("a")  # whatever padding or truncation an earlier call has left in it is no part of it
    digest = hashlib.blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def read(folder: Path) -> tuple[dict[str, ExampleFile], dict[str, Any]] | None:
    """The sets of examples and their reports; None where they are not there, or damaged: then they are removed."""
    if not folder.is_dir():
        return None
    try:
        reports = json.loads((folder / "reports.json").read_text(encoding="utf-8"))
        return {name: ExampleFile(folder / name) for name in reports}, reports
    except (OSError, ValueError, Damaged) as error:
        log.warning("tokenised data: %s is damaged (%s); it is removed and made again", folder, error)
        aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")  # others may be about to remove it too
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return None
        shutil.rmtree(aside, ignore_errors=True)
        return None


def write(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Let `build` write the sets of examples into a folder and return their reports: once, whole or not at all."""

    def whole(partial: Path) -> None:
        reports = build(partial)
        (partial / "reports.json").write_text(json.dumps(reports), encoding="utf-8")

    build_once(folder, whole)
