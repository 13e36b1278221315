"""A penalty for completions that are too long."""

from __future__ import annotations

import re
from typing import Any, Literal

from alignment.errors import UserError
from alignment.reward.combine import NUM_TOKENS

Unit = Literal["tokens", "words", "characters"]


def length_of(completion: str, row: dict[str, Any], unit: Unit, key: str) -> int:
    """Length of a completion. UserError where tokens are asked for and nobody has counted them."""
    if unit == "words":
        return len(re.findall(r"\S+", completion))
    if unit == "characters":
        return len(completion)
    if NUM_TOKENS not in row:
        raise UserError(f"{key}.unit: completions in a file have no tokens to count: type {key}.unit=words")
    return row[NUM_TOKENS]


class LengthPenalty:
    """DAPO's soft overlong punishment (2503.14476 eq. 13): 0, then a slope down to -1, then -1.

    longest: length from which it is -1. slope: how long before that it begins to fall; the paper has 20480 and 4096.
    unit: what a length counts; tokens are the policy's, the end token included, and known where it sampled.
    weight: factor of this reward in the total.
    """

    def __init__(self, *, longest: int, slope: int, unit: Unit = "tokens", weight: float = 1.0) -> None:
        if not 0 < slope <= longest:
            raise UserError(
                f"reward.length_penalty.slope: it must be at least 1 and at most longest={longest}, not {slope}: type "
                f"reward.length_penalty.slope={max(1, longest // 5)}"
            )
        self.longest, self.slope, self.weight = longest, slope, weight
        self.unit: Unit = unit

    def __call__(self, completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        """Scores from -1 to 0, one for each completion."""
        pairs = zip(completions, rows, strict=True)
        lengths = [length_of(text, row, self.unit, "reward.length_penalty") for text, row in pairs]
        return [min(0.0, max(-1.0, (self.longest - self.slope - length) / self.slope)) for length in lengths]
