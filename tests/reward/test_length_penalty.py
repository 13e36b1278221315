"""Scores by hand from the paper's formula."""

from __future__ import annotations

import pytest

from alignment.errors import UserError
from alignment.reward.combine import NUM_TOKENS
from alignment.reward.length_penalty import LengthPenalty


def test_soft_overlong_is_the_papers() -> None:
    """Longest 100, slope 20: 0 up to 80, (80 - n) / 20 up to 100, -1 beyond (2503.14476 eq. 13)."""
    lengths = [10, 80, 81, 90, 100, 101]
    scores = LengthPenalty(longest=100, slope=20)([""] * 6, [{NUM_TOKENS: n} for n in lengths])
    assert scores == pytest.approx([0, 0, -0.05, -0.5, -1, -1])


def test_words_and_characters() -> None:
    text = "one two  three\nfour"
    assert LengthPenalty(longest=4, slope=2, unit="words")([text], [{}]) == [-1.0]
    assert LengthPenalty(longest=20, slope=10, unit="characters")([text], [{}]) == [
        pytest.approx(-0.9)
    ]  # 19 characters


def test_tokens_that_nobody_counted_are_refused() -> None:
    with pytest.raises(UserError, match=r"type reward\.length_penalty\.unit=words"):
        LengthPenalty(longest=4, slope=2)(["a"], [{}])


@pytest.mark.parametrize("slope", [0, 5])
def test_a_slope_outside_the_length_is_refused(slope: int) -> None:
    with pytest.raises(UserError, match=r"reward\.length_penalty\.slope: .* at most longest=4"):
        LengthPenalty(longest=4, slope=slope)
