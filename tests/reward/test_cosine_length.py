"""Scores by hand from the paper's formula."""

from __future__ import annotations

import pytest

from alignment.errors import UserError
from alignment.reward.combine import NUM_TOKENS
from alignment.reward.cosine_length import CosineLength


@pytest.mark.parametrize(
    ("completion", "length", "score"),
    [
        ("4", 0, 2.0),
        ("4", 50, 1.5),  # the middle of the wave
        ("4", 25, 1.853553),  # 1 + (1 + cos(pi/4)) / 2
        ("4", 99, 1.000247),
        ("4", 100, -10.0),
        ("5", 0, -10.0),
        ("5", 50, -5.0),
        ("5", 100, -10.0),
    ],
)
def test_the_cosine_of_the_length(completion: str, length: int, score: float) -> None:
    reward = CosineLength(longest=100)
    assert reward([completion], [{"answer": "4", NUM_TOKENS: length}]) == [pytest.approx(score, abs=1e-6)]


def test_what_accuracy_cannot_score_this_cannot() -> None:
    assert CosineLength(longest=100)(["4"], [{NUM_TOKENS: 3}]) == [None]
    with pytest.raises(UserError, match=r"reward\.cosine_length\.tolerance"):
        CosineLength(longest=100, tolerance=2.0)
    with pytest.raises(UserError, match=r"reward\.cosine_length\.longest: 0"):
        CosineLength(longest=0)
