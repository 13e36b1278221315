"""Penalties computed by hand, and against a set of tuples."""

from __future__ import annotations

import random

import pytest

from alignment.errors import UserError
from alignment.reward.repetition_penalty import RepetitionPenalty, repeated


@pytest.mark.parametrize(
    ("text", "ngram", "score"),
    [
        ("", 2, 0.0),
        ("one", 2, 0.0),
        ("one two three", 2, 0.0),
        ("a b a b a", 2, -0.5),  # ab ba ab ba: 2 of 4 are new
        ("A b, a B! a", 2, -0.5),
        ("x " * 101, 1, -100 / 101),
        ("don't stop don't stop", 2, -1 / 3),  # 3 pieces, the last is the first again
        ("日本日本日", 2, -0.5),
        ("1 2 3 4 1 2 3 4", 4, -0.2),  # 1234 2341 3412 4123 1234
    ],
)
def test_score(text: str, ngram: int, score: float) -> None:
    assert RepetitionPenalty(ngram=ngram)([text], [{}]) == [pytest.approx(score)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_pieces_are_counted_as_a_set_of_tuples_would(size: int) -> None:
    words = random.Random(size).choices("ab", k=60)
    pieces = [tuple(words[i : i + size]) for i in range(60 - size + 1)]
    assert repeated(words, size) == pytest.approx(1 - len(set(pieces)) / len(pieces))


def test_no_words_are_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.repetition_penalty\.ngram: 0"):
        RepetitionPenalty(ngram=0)
