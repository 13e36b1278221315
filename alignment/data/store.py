"""Tokenised examples on disk: written once, then read one at a time, so that memory does not grow with their number.

A folder holds `tokens` (int32: prompt, then completions), `masks` (a byte per completion token, of examples that have
any), `rows` (the pickled row and id) and `index` (int64: where an example begins in each, and its lengths). Files are
read at a place, not mapped: pages of a mapped file count as the memory of the process.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from array import array
from pathlib import Path
from typing import Any

from alignment.batch import Example
from alignment.data.views import View

FILES: tuple[str, ...] = ("tokens", "masks", "rows", "index")
# Of an index record: where tokens, masks (-1 = all count) and row begin, the row's size, the prompt's length.
HEAD = 5


class ExampleWriter:
    """Writes examples into an empty folder; `close` makes it readable."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, self.group = folder, 0, 0
        self._files = {name: io.BufferedWriter(io.FileIO(folder / name, "w")) for name in FILES}
        self._ends = dict.fromkeys(FILES, 0)
        self._content = hashlib.sha256()
        self._sums = {name: hashlib.blake2b(digest_size=16) for name in FILES}

    def __len__(self) -> int:
        return self.count

    def append(self, example: Example) -> None:
        if not self.count:
            self.group = len(example.completions)
        lengths = [len(ids) for ids in example.completions]
        lengths = [*lengths, *[0] * self.group][: self.group]  # of another number than the first: `encode` will refuse
        row = pickle.dumps((dict(example.columns), example.id), protocol=5)
        masks = example.loss_masks
        start = self._ends["masks"] if masks is not None else -1
        record = [self._ends["tokens"], start, self._ends["rows"], len(row), len(example.prompt_ids), *lengths]
        self._write("tokens", array("i", [*example.prompt_ids, *(i for ids in example.completions for i in ids)]))
        if masks is not None:
            self._write("masks", bytes(counts for mask in masks for counts in mask))
        self._write("rows", row)
        self._write("index", array("q", record))
        self._content.update(described(example))
        self.count += 1

    def _write(self, name: str, data: array[int] | bytes) -> None:
        content = data if isinstance(data, bytes) else data.tobytes()
        self._files[name].write(content)
        self._sums[name].update(content)
        self._ends[name] += len(content)

    def close(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        sums = {name: digest.hexdigest() for name, digest in self._sums.items()}
        meta = {"count": self.count, "group": self.group, "content": self._content.hexdigest(), "sums": sums}
        (self.folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def described(example: Example) -> bytes:
    """What of an example a fingerprint covers."""
    return repr((example.id, example.prompt_ids, example.completions)).encode()


class Damaged(Exception):
    """A folder of examples that is not what was written."""


class ExampleFile(View):
    """Examples that `ExampleWriter` wrote, each made when it is asked for. Damaged where a file has changed.

    The files are opened at once: a folder that is removed later stays readable here.
    """

    def __init__(self, folder: Path, *, check: bool = True) -> None:
        self.folder = folder
        try:
            meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            self._files = {name: io.FileIO(folder / name) for name in FILES}
        except (OSError, ValueError) as error:
            raise Damaged(str(error)) from error
        self.size, self.group, self.content = meta["count"], meta["group"], meta["content"]
        for name, file in self._files.items() if check else ():
            if hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest() != meta["sums"][name]:
                raise Damaged(f"{folder / name} is not what was written")

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder,)

    def row(self, index: int) -> Example:
        width = (HEAD + self.group) * 8
        record = array("q", self._read("index", width, index * width))
        tokens_at, masks_at, row_at, row_size, prompt, *lengths = record
        total = sum(lengths)
        ids = array("i", self._read("tokens", (prompt + total) * 4, tokens_at)).tolist()
        columns, key = pickle.loads(self._read("rows", row_size, row_at))
        masks = None
        if masks_at >= 0:
            masks = _cut(list(map(bool, self._read("masks", total, masks_at))), lengths)
        return Example(ids[:prompt], _cut(ids[prompt:], lengths), masks, columns, key)

    def _read(self, name: str, size: int, start: int) -> bytes:
        return os.pread(self._files[name].fileno(), size, start)


def _reopened(folder: Path) -> ExampleFile:
    return ExampleFile(folder, check=False)


def _cut(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    parts, at = [], 0
    for length in lengths:
        parts.append(values[at : at + length])
        at += length
    return parts
