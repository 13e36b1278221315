"""Rows looked at without being copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class View(ABC, Sequence[Any]):
    """Rows of other sequences, each looked up when it is asked for."""

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Some(self, range(len(self))[index])
        return self.row(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @abstractmethod
    def row(self, index: int) -> Any:
        """The row at a place from 0 on."""


class Some(View):
    """The rows at some places of a sequence, in their order."""

    def __init__(self, rows: Sequence[Any], places: Sequence[int]) -> None:
        self.rows, self.places = rows, places

    def __len__(self) -> int:
        return len(self.places)

    def row(self, index: int) -> Any:
        return self.rows[self.places[index]]
