"""Rows set down in a nameless file while they are looked at, so that memory does not grow with their number."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array

from alignment.data.schema import Row
from alignment.data.views import View

# Rows up to this many bytes stay in memory: most data are no more than that.
IN_MEMORY = 2**24


class Spool(View):
    """Rows that are appended, then read at any place. The file is in the system's folder for such (TMPDIR)."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, row: Row) -> None:
        content = pickle.dumps((row.where, dict(row)), protocol=5)
        self._file.seek(0, os.SEEK_END)
        self._file.write(content)
        self._ends.append(self._ends[-1] + len(content))

    def row(self, index: int) -> Row:
        start, end = self._ends[index], self._ends[index + 1]
        self._file.seek(start)
        where, fields = pickle.loads(self._file.read(end - start))
        row = Row(fields)
        row.where = where
        return row
