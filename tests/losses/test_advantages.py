"""Advantages from groups: values, invariances, unscorable rewards, bad sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.advantages import (
    SCALES,
    centered_tokens,
    gdpo_sums,
    group_advantages,
    group_statistics,
    normalize_then_sum,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax_advantages,
    reward_stats,
    reward_std,
    rloo_advantages,
    sum_then_normalize,
)
from alignment.losses.reduce import moments
from alignment.losses.token_rewards import rewards_to_go, token_rewards

NAN = float("nan")


def test_grpo_advantages(vector: Callable) -> None:
    v = vector("grpo_advantages")
    groups = v["rewards"]
    rewards, size, eps = groups.flatten(), v.params["group_size"], v.params["eps"]
    for scale in SCALES:
        options = {"eps": eps} if scale in ("group", "batch") else {}
        v.check(scale, group_advantages(rewards, size, scale=scale, **options).view_as(groups))
        default = group_advantages(rewards, size, scale=scale)
        torch.testing.assert_close(default, group_advantages(rewards, size, scale=scale, **options))
    v.check("group_eps_1e-6_verl", group_advantages(rewards, size, eps=1e-6).view_as(groups))
    v.check("group_std_ddof1", group_statistics(groups)[1].flatten())
    v.check("batch_std_ddof1", reward_std(rewards))
    v.check("frac_reward_zero_std", reward_stats(rewards, size)["frac_reward_zero_std"].mean())
    v.leave("group_population_std_eps_1e-4")


def test_grpo_advantages_unscorable(vector: Callable) -> None:
    v = vector("grpo_advantages_unscorable")
    rewards = v["rewards"]
    v.check("group", group_advantages(rewards.flatten(), 4, eps=v.params["eps"]).view_as(rewards))


def test_grpo_multi_reward(vector: Callable) -> None:
    v = vector("grpo_multi_reward")
    rewards, weights, eps = v["rewards"].view(-1, 2), torch.tensor(v.params["weights"]).double(), v.params["eps"]
    v.check("sum_then_normalize", sum_then_normalize(rewards, weights, 4, eps=eps).view(2, 4))
    gdpo = normalize_then_sum(rewards, weights, 4, eps=eps)
    v.check("normalize_then_sum_gdpo", gdpo.view(2, 4))
    over = moments(gdpo_sums(rewards, weights, 4))
    torch.testing.assert_close(normalize_then_sum(rewards, weights, 4, of=over), gdpo)


def test_several_rewards_where_some_are_missing() -> None:
    """Row 1 has only the second reward: sums 3, 2, NaN, 1 -> centred by their mean 2."""
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN], [1.0, 0.0]])
    weights = torch.tensor([1.0, 1.0])
    assert sum_then_normalize(rewards, weights, 4, scale="none").tolist() == [1, 0, 0, -1]
    gdpo = normalize_then_sum(rewards, weights, 4)
    assert gdpo[2] == 0
    assert torch.isfinite(gdpo).all()


def test_rloo_advantages(vector: Callable) -> None:
    v = vector("rloo_advantages")
    rewards, kl, size, beta = v["rewards"], v["kl_seq_sum_k1"], v.params["group_size"], v.params["beta"]
    found = rloo_advantages(rewards, kl, size, beta=beta)
    v.check("advantages", found)
    v.check("identity_G_over_Gm1_times_centered", found)
    v.check("advantages_no_kl", rloo_advantages(rewards, None, size))
    eps = v.params["eps"]
    v.check("advantages_normalized", rloo_advantages(rewards, kl, size, beta=beta, normalize=True, eps=eps))
    v.check("rewards_after_kl", rewards - beta * kl)


def test_rloo_nan_and_singleton(vector: Callable) -> None:
    v = vector("rloo_nan_and_singleton")
    size = v.params["group_size"]
    v.check("advantages", rloo_advantages(v["rewards"], None, size))
    v.check("advantages", group_advantages(v["rewards"], size, scale="leave_one_out"))


def test_reinforce_plus_plus(vector: Callable) -> None:
    v = vector("reinforce_plus_plus")
    mask, beta = v["mask"], v.params["beta"]
    rewards, _ = token_rewards(v["scores"], v["logps"], v["ref_logps"], mask, beta=beta)
    returns = rewards_to_go(rewards, mask, gamma=v.params["gamma"])
    v.check("returns", returns)
    v.check("advantages_ddof1_verl", reinforce_plus_plus(returns, mask))
    v.leave("advantages_population_std_openrlhf")


def test_reinforce_plus_plus_baseline(vector: Callable) -> None:
    v = vector("reinforce_plus_plus_baseline")
    rewards, mask, size = v["rewards"], v["mask"], v.params["group_size"]
    v.check("centered", group_advantages(rewards, size, scale="none"))
    found = reinforce_plus_plus_baseline(rewards, mask, size)
    v.check("token_advantages", found)
    over = moments(centered_tokens(rewards, mask, size), mask)
    torch.testing.assert_close(reinforce_plus_plus_baseline(rewards, mask, size, of=over), found)


def test_reinforce_plus_plus_baseline_leaves_unscorable_rows_out() -> None:
    """The row adds no token to the whitening and gets 0: the others are as if it were empty."""
    rewards, mask = torch.tensor([1.0, 0.0, NAN, 0.5]), torch.ones(4, 2, dtype=torch.bool)
    found = reinforce_plus_plus_baseline(rewards, mask, 2)
    assert not found[2].any()
    kept = mask.clone()
    kept[2] = False
    torch.testing.assert_close(found, reinforce_plus_plus_baseline(rewards.nan_to_num(0.5), kept, 2))


def test_remax_advantage(vector: Callable) -> None:
    v = vector("remax_advantage")
    v.check("advantages", remax_advantages(v["rewards"], v["greedy_rewards"]))
    returns = v["rewards"][:, None].expand(2, 3)
    v.check("advantages", remax_advantages(returns, v["greedy_rewards"])[:, 1])
    assert remax_advantages(torch.tensor([NAN, 1.0]), torch.tensor([0.0, NAN])).tolist() == [0, 0]


def test_statistics_are_those_of_the_group() -> None:
    """B40: [1, 0] and [10, 9] each have ddof-1 std 0.7071, so +-0.7071; [1,0,0,0] has mean 1/4, std 1/2."""
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    pairs = group_advantages(torch.tensor([1.0, 0.0, 10.0, 9.0]), 2)
    torch.testing.assert_close(pairs, torch.tensor([half, -half, half, -half]))
    four = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    torch.testing.assert_close(four, torch.tensor([0.75, -0.25, -0.25, -0.25]) / 0.5001)


def test_bad_group_sizes_are_refused() -> None:
    """B40: the message lists the sizes that would do."""
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.zeros(4), 1)
    with pytest.raises(ValueError, match=r"8 rewards are not whole groups of 3.*\[2, 4, 8\]"):
        group_advantages(torch.zeros(8), 3)
    with pytest.raises(ValueError, match="choose from group, batch, none, leave_one_out"):
        group_advantages(torch.zeros(4), 2, scale="std")
    with pytest.raises(ValueError, match="none cannot use eps"):
        group_advantages(torch.zeros(4), 2, scale="none", eps=1e-4)
    with pytest.raises(ValueError, match=r"beta=0.1 needs the KL"):
        rloo_advantages(torch.zeros(4), None, 2, beta=0.1)


@pytest.mark.parametrize("scale", SCALES)
def test_shifting_a_group_changes_nothing(scale: str) -> None:
    rewards = torch.tensor([0.5, 1.0, 0.0, 0.25, 2.0, 2.5, 0.0, 1.0], dtype=torch.float64)
    shift = torch.tensor([3.0] * 4 + [-7.0] * 4, dtype=torch.float64)
    # One std over the whole batch is about raw rewards: there only a common shift changes nothing.
    shift = torch.full_like(shift, 3.0) if scale == "batch" else shift
    shifted = group_advantages(rewards + shift, 4, scale=scale)
    torch.testing.assert_close(shifted, group_advantages(rewards, 4, scale=scale))
    torch.testing.assert_close(
        rloo_advantages(rewards + shift, rewards, 4, beta=0.1), rloo_advantages(rewards, rewards, 4, beta=0.1)
    )


@pytest.mark.parametrize("scale", SCALES)
def test_order_within_a_group_does_not_matter_and_advantages_sum_to_zero(scale: str) -> None:
    rewards = torch.randn(8, dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1, 5, 4, 7, 6])
    found = group_advantages(rewards, 4, scale=scale)
    torch.testing.assert_close(group_advantages(rewards[order], 4, scale=scale), found[order])
    torch.testing.assert_close(found.view(2, 4).sum(1), torch.zeros(2).double(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_near_ties_are_ties(scale: str) -> None:
    """Rewards that differ by less than 1e-6 are rounding noise: advantage exactly 0, not noise / (noise + 1e-4)."""
    rewards = torch.tensor([0.3, 0.3 + 1e-7, 0.3 - 1e-7, 0.3], dtype=torch.float64)
    assert not group_advantages(rewards, 4, scale=scale).any()
    # 0.1 in float32, three times: the mean need not be the value itself
    assert not group_advantages(torch.full((3,), 0.1), 3, scale=scale).any()
    assert (reward_stats(rewards, 4)["frac_reward_zero_std"] == 1).all()


@pytest.mark.parametrize("scale", SCALES)
def test_an_unscorable_completion_leaves_the_others_as_if_it_were_not_there(scale: str) -> None:
    some = group_advantages(torch.tensor([1.0, NAN, 0.0, 0.5]).double(), 4, scale=scale)
    rest = group_advantages(torch.tensor([1.0, 0.0, 0.5]).double(), 3, scale=scale)
    torch.testing.assert_close(some[[0, 2, 3]], rest)
    assert some[1] == 0
    assert not group_advantages(torch.full((4,), NAN), 4, scale=scale).any()


def test_batch_scale_over_ranks() -> None:
    """B40: with the moments of all ranks a rank's half equals the single process's."""
    rewards = torch.randn(8, dtype=torch.float64)
    whole = group_advantages(rewards, 4, scale="batch")
    halves = [moments(half) for half in rewards.split(4)]
    over = halves[0].merge(halves[1])
    parts = [group_advantages(half, 4, scale="batch", of=over) for half in rewards.split(4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_reward_statistics() -> None:
    stats = reward_stats(torch.tensor([1.0, 1.0, NAN, 0.0]), 2)
    assert stats["frac_reward_zero_std"].tolist() == [1, 1, 1, 1]  # one scorable sample has nothing to compare with
    assert stats["reward"].isnan().tolist() == [False, False, True, False]
    assert float(reward_std(torch.tensor([1.0, NAN, 3.0]))) == pytest.approx(math.sqrt(2))
    assert reward_std(torch.tensor([1.0, NAN])).isnan()
