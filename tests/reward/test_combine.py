"""The weighted sum and the contract of a reward."""

import numpy as np
import pytest
import torch

from alignment.errors import UserError
from alignment.reward.combine import RewardError, RewardSet

TEXTS, ROWS = ["a", "b", "c", "d"], [{"prompt": "p"}] * 4


def fixed(*scores):
    return lambda completions, rows: list(scores)


def test_the_weighted_sum_by_hand() -> None:
    both = RewardSet({"x": (fixed(1.0, 0.0, None, None), 2.0), "y": (fixed(0.5, 1.0, 1.0, None), -1.0)})(TEXTS, ROWS)
    # 2*1 - 0.5; 2*0 - 1; x is left out: -1; nothing left
    assert both.total == [1.5, -1.0, -1.0, None]
    assert both.parts == {"x": [1.0, 0.0, None, None], "y": [0.5, 1.0, 1.0, None]}


def test_weight_zero_is_measured_and_decides_nothing() -> None:
    both = RewardSet({"x": (fixed(1.0, None, 0.0, 1.0), 1.0), "y": (fixed(5.0, 5.0, 5.0, 5.0), 0.0)})(TEXTS, ROWS)
    assert both.total == [1.0, None, 0.0, 1.0]
    assert both.parts["y"] == [5.0] * 4


def test_completions_and_rows_reach_every_reward_in_order() -> None:
    seen = []

    def spy(completions, rows):
        seen.append((completions, rows))
        return [0.0] * len(rows)

    rows = [{"answer": str(i)} for i in range(4)]
    RewardSet({"x": (spy, 1.0), "y": (spy, 1.0)})(TEXTS, rows)
    assert seen == [(TEXTS, rows)] * 2


@pytest.mark.parametrize(
    "scores", [(0, 1, True, None), np.array([0.0, 1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])]
)
def test_numbers_of_every_kind_become_floats(scores) -> None:
    part = RewardSet({"x": (lambda completions, rows: scores, 1.0)})(TEXTS, ROWS).parts["x"]
    assert part[:3] == [0.0, 1.0, 1.0]
    assert {type(value) for value in part[:3]} == {float}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"returned 1 scores for 4 completions"),
        ([1.0] * 5, r"returned 5 scores for 4 completions"),
        (1.0, r"must return a list of 4 numbers or None, got 1\.0"),
        (None, r"must return a list of 4 numbers or None, got None"),
        ("abcd", r"must return a list of 4 numbers"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, r"must return a list of 4 numbers"),
        ([1.0, 1.0, "1.0", 1.0], r"returned '1\.0' for completion 2"),
        ([1.0, float("nan"), 1.0, 1.0], r"returned nan for completion 1: return a finite number, or None"),
        ([1.0, 1.0, 1.0, float("inf")], r"returned inf for completion 3"),
        ([1.0, 10**400, 1.0, 1.0], r"returned 1000.* for completion 1"),
        ([1.0, 10**5000, 1.0, 1.0], r"returned a whole number of 16610 bits for completion 1"),
        ([[1.0], [1.0], [1.0], [1.0]], r"returned \[1\.0\] for completion 0"),
    ],
)
def test_the_contract_names_the_function(returned, message: str) -> None:
    def my_score(completions, rows):
        return returned

    with pytest.raises(ValueError, match=rf"reward 'mine' \(.*my_score\) {message}"):
        RewardSet({"mine": (my_score, 1.0)})(TEXTS, ROWS)


def test_an_exception_is_raised_and_names_function_and_place() -> None:
    def my_score(completions, rows):
        raise KeyError("answer")

    with pytest.raises(
        RewardError, match=r"reward 'mine' \(.*my_score\) raised KeyError \(test_combine.py, line \d+\)"
    ):
        RewardSet({"mine": (my_score, 1.0)})(TEXTS, ROWS)


def test_no_rewards_make_every_completion_unscorable() -> None:
    scores = RewardSet({})(TEXTS, ROWS)
    assert scores.total == [None] * 4
    assert scores.parts == {}


def test_no_completions_call_no_reward() -> None:
    def never(completions, rows):
        raise AssertionError("called")

    scores = RewardSet({"x": (never, 1.0)})([], [])
    assert (scores.total, scores.parts) == ([], {"x": []})


def test_rows_must_match_the_completions() -> None:
    with pytest.raises(ValueError, match="4 completions need as many rows, got 3"):
        RewardSet({"x": (fixed(1.0), 1.0)})(TEXTS, ROWS[:3])


@pytest.mark.parametrize(("weight", "message"), [(0.0, "every reward has weight 0"), (float("nan"), "finite")])
def test_weights_that_mean_nothing_are_refused(weight: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardSet({"x": (fixed(1.0), weight)})


def test_counters_and_closing_reach_every_reward() -> None:
    class Counting:
        counters = {"timeouts": 2, "errors": 0}
        closed = False

        def __call__(self, completions, rows):
            return [0.0] * len(rows)

        def close(self) -> None:
            self.closed = True

    counting = Counting()
    rewards = RewardSet({"slow": (counting, 1.0), "plain": (fixed(1.0), 1.0)})
    assert rewards.counters == {"slow/timeouts": 2, "slow/errors": 0}
    rewards.close()
    assert counting.closed


def test_a_reward_called_as_a_metric_is_refused() -> None:
    """Its scores would be averaged with what that metric measures."""
    with pytest.raises(UserError, match=r"reward\.length: there is a metric of that name"):
        RewardSet({"length": (lambda completions, rows: [0.0], 1.0)})


def test_a_score_that_only_some_of_a_group_have() -> None:
    """Two groups of two: the first lost one completion to a time-out, the second has no answer to compare with."""
    some = RewardSet({"a": (lambda c, r: [1.0, None, None, None], 1.0), "b": (lambda c, r: [0.5] * 4, 1.0)})
    assert some(["x"] * 4, [{}] * 4, group_size=2).total == [1.5, None, 0.5, 0.5]
    assert some(["x"] * 4, [{}] * 4).total == [1.5, 0.5, 0.5, 0.5]  # nothing to compare with
    measured = RewardSet({"a": (lambda c, r: [1.0, None, None, None], 0.0), "b": (lambda c, r: [0.5] * 4, 1.0)})
    assert measured(["x"] * 4, [{}] * 4, group_size=2).total == [0.5] * 4
