"""A penalty for saying the same again."""

from __future__ import annotations

import re
from typing import Any

from alignment.errors import UserError

# A word with its apostrophes, or one sign of a script that puts no spaces between words (Han, kana, Thai, ...).
WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]|[^\W_]+(?:['’][^\W_]+)*")


class RepetitionPenalty:
    """-(share of the pieces of `ngram` words that occur before in the completion): 0 = nothing twice, towards -1.

    The n-gram penalty of 2502.03373 (section 4.3) in the form that open-r1 uses, `1 - unique / all`, over whole
    completions. Words are compared without case and punctuation. A completion of fewer words scores 0.

    ngram: words of a piece. weight: factor of this reward in the total, so the largest penalty.
    """

    def __init__(self, *, ngram: int = 4, weight: float = 1.0) -> None:
        if ngram < 1:
            key = "reward.repetition_penalty.ngram"
            raise UserError(f"{key}: {ngram} is no number of words: type {key}=4")
        self.ngram, self.weight = ngram, weight

    def __call__(self, completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        """Scores from -1 to 0, one for each completion."""
        return [0.0 - repeated(WORD.findall(text.casefold()), self.ngram) for text in completions]


def repeated(words: list[str], size: int) -> float:
    """Share of the pieces that are not the first of their kind."""
    count = len(words) - size + 1
    return 1 - _distinct(words, size) / count if count > 0 else 0.0


def _distinct(words: list[str], size: int) -> int:
    """Number of different pieces, in time and memory of the words times log(size), not times size.

    Pieces of a length get numbers; a piece of up to twice the length is the pair of the numbers at its two ends.
    """
    codes, length = _numbered(words), 1
    while length < size:
        step = min(length, size - length)
        codes = _numbered(list(zip(codes, codes[step:], strict=False)))
        length += step
    return len(set(codes))


def _numbered(items: list[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]
