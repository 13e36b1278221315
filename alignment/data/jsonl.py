"""Rows of local files: JSON Lines, JSON, CSV, Parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from alignment.data import files
from alignment.data.schema import Form, Found, check_rows, shortened
from alignment.data.source import RowSource
from alignment.errors import UserError

# Rows that are looked at before anything heavy loads; load() looks at all of them.
PREFLIGHT_ROWS = 20_000


class Jsonl(RowSource):
    """A file (.jsonl, .json, .csv, .tsv, .parquet, each also .gz), a folder of such files, or a glob.

    path: relative to the folder the run is started from. Other keywords: see RowSource; `heldout` as text is another
    file, folder or glob.
    """

    checks_itself: ClassVar[bool] = True

    def __init__(self, *, path: str, **common: Any) -> None:
        super().__init__(**common)
        self.path = path

    def __str__(self) -> str:
        return self.path

    def found(self, where: str | None) -> Iterator[Found]:
        key, path = ("data.path", self.path) if where is None else ("data.heldout", where)
        for file in files.find(path, key):
            yield from files.read(file)

    def content(self) -> str:
        """Of every file, its name and its bytes."""
        paths = [("data.path", self.path)] + ([("data.heldout", self.heldout)] if isinstance(self.heldout, str) else [])
        digest = hashlib.blake2b(digest_size=16)
        for key, path in paths:
            for file in files.find(path, key):
                digest.update(f"{key} {file}\0".encode("utf-8", "surrogatepass"))
                with file.open("rb") as handle:
                    digest.update(hashlib.file_digest(handle, hashlib.blake2b).digest())
        return digest.hexdigest()

    @classmethod
    def problems(cls, form: Form, **keys: Any) -> list[str]:
        """What is wrong with the files or their first rows, one message each, without importing torch or datasets.

        Keys that are missing or of a wrong type are left to whoever checks signatures: then nothing is said here.
        """
        try:
            source = cls(**keys)
        except TypeError:
            return []
        if not isinstance(source.path, str) or not isinstance(keys.get("fields") or {}, dict):
            return []
        found: list[Found] = []
        problems: list[str] = []
        for where in (None, source.heldout) if isinstance(source.heldout, str) else (None,):
            try:
                found += islice(source.found(where), PREFLIGHT_ROWS)
            except (UserError, OSError) as error:
                problems.append(str(error))
        if source.bad_rows == "raise":
            problems += check_rows(found, form, source.reading, bad_rows="drop")[1]
        if not found and not problems:
            problems.append(f"data.path: {source.path} has no rows: type data.path=<file, folder or glob>")
        return shortened(problems)
