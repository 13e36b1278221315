"""One step of every loss of the GRPO family, against loops over single tokens; the same step however it is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alignment.algorithm.grpo import GRPO
from alignment.errors import UserError

LENGTHS = [[3, 5, 1, 4], [2, 6, 4, 2]]
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.25, 1.0, 1.0, 0.0]
MAX_TOKENS = 9


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def token_loss(name: str, d: list[float], t: int, logprob: float, a: float) -> float:
    """Of token t of a completion whose log-ratios to the sampling policy are d."""
    mean = math.exp(sum(d) / len(d))
    if name in ("gspo", "luspo"):
        return clipped(mean, a, 3e-4, 4e-4)
    if name == "cispo":
        return -min(math.exp(d[t]), 5.0) * a * logprob
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (math.exp(d[t]) - 1))) * a
    if name == "vespo":
        k, rate = (2, 3) if a >= 0 else (3, 2)
        weight = math.exp(sum(d))
        return -(weight**k) * math.exp(rate * (1 - weight)) * a * logprob
    if name == "gmpo":
        kept = [min(x, 0.4) if a > 0 else max(x, -0.4) for x in d]
        return -a * math.exp(sum(kept) / len(kept))
    return clipped(math.exp(d[t]), a, 0.2, 0.28 if name == "dapo" else 0.2)


def average(name: str, rows: list[list[float]]) -> float:
    """As the papers do, over the completions of one step."""
    tokens = sum(map(len, rows))
    if name in ("gspo", "sapo", "gmpo"):
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if name == "luspo":
        return sum(map(sum, rows)) / len(rows)
    if name == "dr_grpo":
        return sum(map(sum, rows)) / (len(rows) * MAX_TOKENS)
    return sum(map(sum, rows)) / tokens


def advantages(name: str) -> list[float]:
    """REWARDS are two groups of four: by hand, mean and ddof-1 deviation of each."""
    values = []
    for group in (REWARDS[:4], REWARDS[4:]):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        values += [(r - mean) / (1 if name == "dr_grpo" else std + 1e-4) for r in group]
    return values


def moved(module: Any) -> None:
    """The policy a little further than where it sampled, so that no ratio is 1."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "luspo", "cispo", "sapo", "vespo", "gmpo"])
def test_a_step_is_that_of_the_loop(online, keys_of, rollout_of, learn, tokens, name: str) -> None:
    keys = keys_of(name)
    module = online(GRPO, group_size=4, microbatch_size=4, num_iterations=2, max_new_tokens=MAX_TOKENS, **keys)
    rollout = rollout_of(LENGTHS, REWARDS)
    old = tokens(module.policy, rollout)
    if name == "bnpo":
        module.microbatch_size = 8  # one microbatch is the step: then its mean over tokens is DAPO's
    batches = module.prepare_rollout(rollout)
    moved(module)
    new, ref = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
    rows = []
    for n, a in enumerate(advantages(name)):
        d = [x - y for x, y in zip(new[n], old[n], strict=True)]
        row = [token_loss(name, d, t, new[n][t], a) for t in range(len(d))]
        if keys["beta"]:
            gaps = [x - y for x, y in zip(new[n], ref[n], strict=True)]
            row = [x + 0.04 * math.exp(d[t]) * (math.exp(-gaps[t]) - 1 + gaps[t]) for t, x in enumerate(row)]
        rows.append(row)
    loss, _, metrics = learn(module, batches)
    assert loss == pytest.approx(average(name, rows), rel=1e-4, abs=1e-6)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo", "gmpo"])
def test_the_microbatch_changes_neither_loss_nor_gradient(online, keys_of, rollout_of, learn, tiny_llama, name) -> None:
    """Also where a group is cut, and where a completion is unscorable."""
    rewards = [*REWARDS[:5], math.nan, *REWARDS[6:]]
    start = {key: value.clone() for key, value in tiny_llama.state_dict().items()}
    results = []
    for size in (8, 4, 2, 1):
        module = online(GRPO, group_size=4, microbatch_size=size, max_new_tokens=MAX_TOKENS, **keys_of(name))
        tiny_llama.load_state_dict(start)
        batches = module.prepare_rollout(rollout_of(LENGTHS, rewards))
        assert len(batches) == 8 // size
        results.append(learn(module, batches)[:2])
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)
    assert results[0][1].norm() > 1e-4


def test_minibatches_are_each_a_step_of_their_own(online, keys_of, rollout_of, learn) -> None:
    """Two steps of four completions: the loss of each is over its own 13 and 14 tokens, here -sum(A n) / sum(n)."""
    module = online(GRPO, group_size=4, microbatch_size=2, num_minibatches=2, **keys_of("dapo"))
    batches = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
    a = advantages("dapo")
    for first, lengths in ((0, LENGTHS[0]), (1, LENGTHS[1])):
        expected = -sum(x * n for x, n in zip(a[4 * first :], lengths, strict=False)) / sum(lengths)
        loss, _, _ = learn(module, batches, first=2 * first, count=2)
        assert loss == pytest.approx(expected, rel=1e-4)


def test_batch_scaling_divides_by_the_deviation_of_all_rewards(online, keys_of, rollout_of) -> None:
    module = online(GRPO, group_size=4, microbatch_size=8, **(keys_of("grpo") | {"scale_rewards": "batch"}))
    (batch,) = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
    mean = sum(REWARDS) / 8
    std = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / 7)
    means = [0.375] * 4 + [0.5625] * 4  # of (1, 0, 0.5, 0) and (0.25, 1, 1, 0)
    expected = torch.tensor([(r - m) / (std + 1e-4) for r, m in zip(REWARDS, means, strict=True)])
    torch.testing.assert_close(batch.advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "cispo", "clip_eps": 0.2}, "cispo cannot use clip_eps"),
        ({"loss": "dapo", "tau_pos": 1.0}, "dapo cannot use tau_pos"),
        ({"loss": "sapo", "delta": 4.0}, "sapo cannot use delta"),
        ({"delta": 1.1}, "delta=1.1 must be above the upper clip bound 1.2"),
        ({"loss": "cispo", "is_weight_min": 2.0, "is_weight_max": 1.0}, "is_weight_min < is_weight_max"),
        ({"loss": "sapo", "tau_neg": 0.0}, "tau_pos and tau_neg must be above 0"),
    ],
)
def test_what_a_loss_cannot_use_is_refused(online, keys_of, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"algorithm.loss: .*{message}"):
        online(GRPO, group_size=4, microbatch_size=8, **(keys_of("grpo") | changes))


def test_two_sided_clip_bounds_a_bad_token(online, keys_of, rollout_of, learn, tokens) -> None:
    """A token that became likelier by more than delta pays -A delta, not -A ratio."""
    module = online(GRPO, group_size=4, microbatch_size=8, num_iterations=2, **(keys_of("dapo") | {"delta": 1.3}))
    rollout = rollout_of(LENGTHS, REWARDS)
    batches, old = module.prepare_rollout(rollout), tokens(module.policy, rollout)
    for _ in range(3):
        moved(module)
    new, rows, hit = tokens(module.policy, rollout), [], 0
    for n, a in enumerate(advantages("dapo")):
        ratios = [math.exp(x - y) for x, y in zip(new[n], old[n], strict=True)]
        hit += sum(r > 1.3 and a < 0 for r in ratios)
        rows.append([-min(min(r, 1.3) * a, min(max(r, 0.8), 1.28) * a) for r in ratios])
    assert hit, "no token shows the difference"
    assert learn(module, batches)[0] == pytest.approx(average("dapo", rows), rel=1e-4)
