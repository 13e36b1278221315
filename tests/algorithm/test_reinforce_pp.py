"""REINFORCE++: rewards to go and their whitening over all tokens, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.algorithm.reinforce_pp import ReinforcePP
from alignment.errors import UserError

LENGTHS = [[3, 5], [2, 6], [4, 1]]
REWARDS = [1.0, 0.0, 0.5, math.nan, 1.0, 1.0]
SCORED = [0, 1, 2, 4, 5]


def white(rows: dict[int, list[float]]) -> dict[int, list[float]]:
    values = [x for row in rows.values() for x in row]
    mean = sum(values) / len(values)
    std = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return {n: [(x - mean) / std for x in row] for n, row in rows.items()}


def check(module, rollout, rows: dict[int, list[float]]) -> None:
    found = torch.cat([batch.advantages for batch in module.prepare_rollout(rollout)])
    expected = torch.zeros(6, 6)
    for n, row in white(rows).items():
        expected[n, : len(row)] = torch.tensor(row)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("size", "gamma"), [(6, 1.0), (2, 0.9), (1, 1.0)])
def test_rewards_to_go_hold_the_kl_of_what_follows(online, keys_of, rollout_of, tokens, size, gamma) -> None:
    changes = {"beta": 0.1, "gamma": gamma}
    module = online(ReinforcePP, group_size=2, microbatch_size=size, **(keys_of("reinforce_pp") | changes))
    rollout = rollout_of(LENGTHS, REWARDS)
    policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
    rows = {}
    for n in SCORED:
        rewards = [-0.1 * (p - q) for p, q in zip(policy[n], reference[n], strict=True)]
        rewards[-1] += REWARDS[n]
        rows[n] = [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
    check(module, rollout, rows)


@pytest.mark.parametrize("size", [6, 1])
def test_the_baseline_variant_takes_the_groups_mean_first(online, keys_of, rollout_of, size: int) -> None:
    """(1, 0): +-1/2. (0.5, unscorable): 0. (1, 1): 0. Then whitened over 15 tokens, whose mean is not 0."""
    module = online(ReinforcePP, group_size=2, microbatch_size=size, **keys_of("reinforce_pp_baseline"))
    rows = {0: [0.5] * 3, 1: [-0.5] * 5, 2: [0.0] * 2, 4: [0.0] * 4, 5: [0.0]}
    check(module, rollout_of(LENGTHS, REWARDS), rows)


@pytest.mark.parametrize("option", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_microbatch_changes_neither_loss_nor_gradient(online, keys_of, rollout_of, learn, option: str) -> None:
    results = []
    for size in (6, 2, 1):
        module = online(ReinforcePP, group_size=2, microbatch_size=size, **keys_of(option))
        batches = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
        results.append(learn(module, batches)[:2])
        assert batches[0].step_tokens == 15  # the six tokens of the one without a score are left out
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


def test_a_group_baseline_needs_a_group_and_no_discount(online, keys_of) -> None:
    keys = keys_of("reinforce_pp_baseline")
    with pytest.raises(UserError, match=r"algorithm\.baseline: .*group_size=2"):
        online(ReinforcePP, group_size=1, microbatch_size=2, **keys)
    with pytest.raises(UserError, match=r"algorithm\.gamma"):
        online(ReinforcePP, group_size=2, microbatch_size=2, **(keys | {"gamma": 0.9}))
