"""RLOO's advantages and its three losses, against the paper's sums."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.algorithm.rloo import RLOO

LENGTHS = [[3, 5, 1], [2, 6, 4]]
REWARDS = [1.0, 0.0, 0.5, 0.25, math.nan, 1.0]


def expected_advantages(kl: list[float]) -> list[float]:
    """R = r - 0.05 KL, against the mean of the other scorable ones; the fifth has no reward."""
    total = [r - 0.05 * k for r, k in zip(REWARDS, kl, strict=True)]
    values = [total[i] - (sum(total[:3]) - total[i]) / 2 for i in range(3)]
    return [*values, total[3] - total[5], 0.0, total[5] - total[3]]


@pytest.mark.parametrize("size", [6, 3, 1])
def test_the_kl_is_in_the_reward_before_the_others_are_averaged(online, keys_of, rollout_of, tokens, size) -> None:
    module = online(RLOO, group_size=3, microbatch_size=size, **keys_of("rloo"))
    rollout = rollout_of(LENGTHS, REWARDS)
    policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
    kl = [sum(p) - sum(q) for p, q in zip(policy, reference, strict=True)]
    found = torch.cat([batch.advantages for batch in module.prepare_rollout(rollout)])
    torch.testing.assert_close(found, torch.tensor(expected_advantages(kl)), rtol=1e-4, atol=1e-5)


def test_without_beta_nothing_asks_for_a_reference(online, keys_of, rollout_of) -> None:
    module = online(RLOO, group_size=3, microbatch_size=6, **(keys_of("rloo") | {"beta": 0.0}))
    (batch,) = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
    assert batch.ref_logprobs is None
    assert batch.old_logprobs is None  # and no second pass is made
    torch.testing.assert_close(batch.advantages, torch.tensor(expected_advantages([0.0] * 6)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["dapo", "sequence", "reinforce"])
def test_each_loss_is_that_of_the_loop_and_does_not_depend_on_the_microbatch(
    online, keys_of, rollout_of, learn, tokens, loss: str
) -> None:
    results = []
    for size in (6, 3, 1):
        module = online(RLOO, group_size=3, microbatch_size=size, **(keys_of("rloo") | {"loss": loss}))
        rollout = rollout_of(LENGTHS, REWARDS)
        rows = tokens(module.policy, rollout)
        batches = module.prepare_rollout(rollout)
        results.append(learn(module, batches))
    a, lengths = torch.cat([batch.advantages for batch in batches]).tolist(), [n for row in LENGTHS for n in row]
    if loss == "dapo":  # ratio 1: the mean of -A over tokens
        expected = -sum(x * n for x, n in zip(a, lengths, strict=True)) / sum(lengths)
    elif loss == "sequence":  # the mean of -A over completions
        expected = -sum(a) / 6
    else:  # the mean of -A log p(completion)
        expected = -sum(x * sum(row) for x, row in zip(a, rows, strict=True)) / 6
    for value, gradient, _ in results:
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


def test_the_sequence_clip_looks_at_whole_completions(online, keys_of, rollout_of, learn, tokens) -> None:
    changes = {"loss": "sequence", "clip_eps": 0.1, "num_iterations": 2}
    module = online(RLOO, group_size=3, microbatch_size=3, **(keys_of("rloo") | changes))
    rollout = rollout_of(LENGTHS, REWARDS)
    old, batches = tokens(module.policy, rollout), module.prepare_rollout(rollout)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    new, a = tokens(module.policy, rollout), torch.cat([batch.advantages for batch in batches]).tolist()
    ratios = [math.exp(sum(x) - sum(y)) for x, y in zip(new, old, strict=True)]
    assert any(not 0.9 <= r <= 1.1 for r in ratios)
    terms = [-min(r * x, min(max(r, 0.9), 1.1) * x) for r, x in zip(ratios, a, strict=True)]
    assert learn(module, batches)[0] == pytest.approx(sum(terms) / 6, rel=1e-3)
