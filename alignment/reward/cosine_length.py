"""Accuracy that also pays for brevity."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from alignment.errors import UserError
from alignment.reward.accuracy import Accuracy
from alignment.reward.length_penalty import Unit, length_of


class CosineLength(Accuracy):
    """Right answers earn less the longer they are, wrong ones lose less, along half a wave of the cosine between length
    0 and `longest` ("Demystifying Long Chain-of-Thought", 2502.03373, section 4.2).

    What is right is decided as in reward=accuracy, whose options this has too; unscorable there is unscorable here.

    longest: length at which the wave ends. right_short, right_long, wrong_short, wrong_long: scores at its two ends.
    exceeded: score of a completion that is `longest` or more, right or wrong. unit: see LengthPenalty.
    """

    key: ClassVar[str] = "reward.cosine_length"

    def __init__(
        self,
        *,
        longest: int,
        right_short: float = 2.0,
        right_long: float = 1.0,
        wrong_short: float = -10.0,
        wrong_long: float = 0.0,
        exceeded: float = -10.0,
        unit: Unit = "tokens",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if longest < 1:
            raise UserError(f"{self.key}.longest: {longest} is no length: type {self.key}.longest=1024")
        self.longest, self.exceeded = longest, exceeded
        self.unit: Unit = unit
        self.ends = {True: (right_short, right_long), False: (wrong_short, wrong_long)}

    def __call__(self, completions: list[str], rows: list[dict[str, Any]]) -> list[float | None]:
        """Scores or None, one for each completion."""
        found = super().__call__(completions, rows)
        return [self._along(*item) for item in zip(found, completions, rows, strict=True)]

    def _along(self, right: float | None, completion: str, row: dict[str, Any]) -> float | None:
        if right is None:
            return None
        length = length_of(completion, row, self.unit, self.key)
        if length >= self.longest:
            return self.exceeded
        short, long = self.ends[right == 1.0]
        return long + (short - long) * (1 + math.cos(math.pi * length / self.longest)) / 2
