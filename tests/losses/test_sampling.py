"""Rewards and masks before advantages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.sampling import drop_unfinished, informative_groups, penalize_unfinished, soft_overlong


def test_dapo_soft_overlong(vector: Callable) -> None:
    v = vector("dapo_soft_overlong")
    penalty = soft_overlong(v["lengths"].long(), max_tokens=v.params["max_len"], cache_tokens=v.params["cache"])
    torch.testing.assert_close(penalty, torch.tensor(v.expected["penalty"], dtype=torch.float32))
    v.leave("penalty")  # float32, so compared at its tolerance
    with pytest.raises(ValueError, match="cache_tokens"):
        soft_overlong(torch.tensor([1]), max_tokens=10, cache_tokens=11)


def test_dapo_dynamic_sampling(vector: Callable) -> None:
    v = vector("dapo_dynamic_sampling")
    keep = informative_groups(v["rewards"].flatten(), v["rewards"].shape[1])
    v.check("keep_group", keep)
    v.check("kept", keep.sum())


def test_groups_without_two_different_scores_say_nothing() -> None:
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, nan, nan, 1.0, nan, 0.0, nan, 0.1, 0.1 + 1e-8, 0.1, nan])
    assert informative_groups(rewards, 4).tolist() == [False, True, False]


def test_the_missing_eos_penalty_is_subtracted() -> None:
    """B50: scores [2, 2], penalty 1, only the first finished: [2, 1]; an unscorable one stays unscorable."""
    finished = torch.tensor([True, False])
    assert penalize_unfinished(torch.tensor([2.0, 2.0]), finished, penalty=1.0).tolist() == [2, 1]
    assert penalize_unfinished(torch.tensor([2.0, float("nan")]), finished, penalty=1.0).isnan().tolist() == [
        False,
        True,
    ]
    with pytest.raises(ValueError, match="at least 0"):
        penalize_unfinished(torch.tensor([2.0]), torch.tensor([True]), penalty=-1.0)


def test_overlong_filtering_empties_truncated_rows() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    assert drop_unfinished(mask, torch.tensor([False, True])).tolist() == [[False, False], [True, False]]
