"""What is done to rewards and tokens before the loss, each against arithmetic written out here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alignment.algorithm.grpo import GRPO
from alignment.algorithm.reinforce_pp import ReinforcePP
from alignment.errors import UserError

LENGTHS = [[3, 5, 1, 4], [2, 6, 4, 2]]
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.25, 1.0, 1.0, 0.0]
FINISHED = [True, True, False, True, True, False, True, True]


def grouped_advantages(rewards: list[float]) -> torch.Tensor:
    values = []
    for group in (rewards[:4], rewards[4:]):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        values += [(r - mean) / (std + 1e-4) for r in group]
    return torch.tensor(values)


@pytest.fixture
def grpo(online, keys_of):
    def build(**changes: Any):
        return online(GRPO, group_size=4, **({"microbatch_size": 8, "max_new_tokens": 6} | keys_of("dapo") | changes))

    return build


def test_penalties_come_off_before_the_group_is_compared(grpo, rollout_of) -> None:
    """1 for each that was cut off; with 6 tokens at most, of which 4 are the slope: 0 at 2 tokens, -1 at 6."""
    module = grpo(missing_eos_penalty=1.0, overlong_tokens=4)
    (batch,) = module.prepare_rollout(rollout_of(LENGTHS, REWARDS, FINISHED))
    slope = {1: 0.0, 2: 0.0, 3: -0.25, 4: -0.5, 5: -0.75, 6: -1.0}
    lengths = [n for row in LENGTHS for n in row]
    shaped = [r + slope[n] - (not f) for r, n, f in zip(REWARDS, lengths, FINISHED, strict=True)]
    torch.testing.assert_close(batch.advantages, grouped_advantages(shaped), rtol=1e-5, atol=1e-6)
    assert batch.rewards.tolist() == REWARDS  # what is recorded is what was scored
    assert module.meter.flush()["rollout/shaped_reward"] == pytest.approx(sum(shaped) / 8)


def test_cut_off_completions_leave_the_loss_but_not_the_group(grpo, rollout_of, learn) -> None:
    module = grpo(mask_unfinished=True)
    (batch,) = module.prepare_rollout(rollout_of(LENGTHS, REWARDS, FINISHED))
    expected = grouped_advantages(REWARDS)
    torch.testing.assert_close(batch.advantages, expected, rtol=1e-5, atol=1e-6)
    lengths = torch.tensor([n for row in LENGTHS for n in row]) * torch.tensor(FINISHED)
    assert batch.loss_mask.sum(-1).tolist() == lengths.tolist()
    # On-policy the value of a token is -A.
    assert learn(module, [batch])[0] == pytest.approx(float(-(expected * lengths).sum() / lengths.sum()), rel=1e-5)


def test_the_kl_in_the_reward_is_that_of_the_loop(grpo, rollout_of, tokens) -> None:
    module = grpo(beta=0.3, kl="reward", microbatch_size=2)
    rollout = rollout_of(LENGTHS, REWARDS)
    policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
    kl = [sum(p) - sum(q) for p, q in zip(policy, reference, strict=True)]
    batches = module.prepare_rollout(rollout)
    found = torch.cat([batch.advantages for batch in batches])
    expected = grouped_advantages([r - 0.3 * k for r, k in zip(REWARDS, kl, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert module.meter.flush()["rollout/kl_seq"] == pytest.approx(sum(kl) / 8, rel=1e-4)


def test_a_kl_in_the_reward_is_not_in_the_loss_too(grpo, rollout_of, learn) -> None:
    """On-policy the loss is -sum A n / sum n, nothing besides."""
    module = grpo(beta=0.3, kl="reward")
    (batch,) = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
    lengths = torch.tensor([n for row in LENGTHS for n in row])
    loss, _, metrics = learn(module, [batch])
    assert loss == pytest.approx(float(-(batch.advantages * lengths).sum() / lengths.sum()), rel=1e-4)
    assert metrics["train/kl"] > 0


def test_only_the_least_sure_tokens_train(grpo, rollout_of, learn) -> None:
    """27 tokens, the upper third: quantile 2/3 of the sorted entropies, at rank 26 * 2/3, between the 18th and 19th."""
    results = []
    for size in (8, 2):
        module = grpo(top_entropy=1 / 3, microbatch_size=size)
        batches = module.prepare_rollout(rollout_of(LENGTHS, REWARDS))
        mask = torch.cat([batch.policy_mask for batch in batches])
        entropy = torch.full(mask.shape, torch.nan)
        for n, row in enumerate(torch.cat([batch.completion_ids for batch in batches])):
            batch = batches[n // size]
            prompt = batch.prompt_ids[n % size // batch.group_size][batch.prompt_mask[n % size // batch.group_size]]
            length = LENGTHS[n // 4][n % 4]
            with torch.no_grad():
                logits = module.policy(torch.cat([prompt, row[:length]])[None]).logits[0, len(prompt) - 1 : -1]
            entropy[n, :length] = torch.distributions.Categorical(logits=logits).entropy()
        ordered = sorted(entropy[~entropy.isnan()].tolist())
        limit = ordered[17] + (26 * 2 / 3 - 17) * (ordered[18] - ordered[17])
        assert mask.tolist() == (entropy.nan_to_num(-1) >= limit).tolist()
        assert int(mask.sum()) == 9
        expected = sum(float(-b.advantages @ b.policy_mask.sum(-1).float()) for b in batches) / 27
        results.append(learn(module, batches)[0])
        assert results[-1] == pytest.approx(expected, rel=1e-4)
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_for_another_sampler(grpo, rollout_of, learn, tokens, mode: str) -> None:
    """The sampler says 0.1 less or 0.3 more of every other token; on-policy a token's value is -A times the weight."""
    module = grpo(sampler_correction=mode, sampler_ratio_min=0.8, sampler_ratio_max=1.25)
    rollout = rollout_of(LENGTHS, REWARDS)
    gaps = torch.tensor([0.1, -0.3]).repeat(3).expand(8, 6)  # log trainer - log sampler
    rollout.sampler_logprobs = torch.zeros(8, 6)
    for n, row in enumerate(tokens(module.policy, rollout)):
        for t, logprob in enumerate(row):
            rollout.sampler_logprobs[n, t] = logprob - gaps[n, t]
    a, total, kept = grouped_advantages(REWARDS).tolist(), 0.0, []
    for n, length in enumerate(m for row in LENGTHS for m in row):
        row = gaps[n, :length].tolist()
        for t in range(length):
            ratio = math.exp(sum(row) if mode.startswith("sequence") else row[t])
            inside = 0.8 <= ratio <= 1.25
            kept.append(inside)
            weight = min(max(ratio, 0.8), 1.25) if mode.endswith("truncate") else ratio * inside
            total -= a[n] * weight
    loss, _, metrics = learn(module, module.prepare_rollout(rollout))
    assert loss == pytest.approx(total / 27, rel=1e-4)
    assert metrics["train/sampler_kept"] == pytest.approx(sum(kept) / 27)
    # 15 tokens at even places, 12 at odd ones
    assert metrics["train/sampler_gap"] == pytest.approx((15 * 0.1 + 12 * 0.3) / 27, rel=1e-3)


def test_bad_completions_that_the_policy_left_are_dropped(grpo, rollout_of, learn, tokens) -> None:
    """Two bad ones (of advantage < 0) are 0.6 nats per token less likely than when sampled: over the 0.5 allowed."""
    module = grpo(off_policy_max=0.5)
    rollout = rollout_of(LENGTHS, REWARDS)
    drift = [0.6, 0.6, 0.6, 0.4, 0.6, 0.0, 0.0, 0.4]  # of 0: good, 1: bad, 2: good, 3: bad but near, 4: bad
    rollout.sampler_logprobs = torch.zeros(8, 6)
    for n, row in enumerate(tokens(module.policy, rollout)):
        rollout.sampler_logprobs[n, : len(row)] = torch.tensor(row) + drift[n]
    a, lengths = grouped_advantages(REWARDS), torch.tensor([n for row in LENGTHS for n in row])
    kept = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1])
    loss, _, metrics = learn(module, module.prepare_rollout(rollout))
    assert loss == pytest.approx(float(-(a * lengths * kept).sum() / 27), rel=1e-4)
    assert metrics["train/on_policy"] == pytest.approx(float((lengths * kept).sum()) / 27)


def test_rewards_normalised_apart(grpo, rollout_of) -> None:
    """GDPO by hand: z-scores of each reward in its group, weighted sum, z-score over the rollout."""
    module = grpo(normalize="each")
    module.reward_weights = {"right": 1.0, "style": 0.5}
    rollout = rollout_of(LENGTHS, REWARDS)
    style = [10.0, 30.0, 20.0, 60.0, 50.0, 40.0, 10.0, 20.0]
    rollout.parts = {"right": torch.tensor(REWARDS), "style": torch.tensor(style)}
    (batch,) = module.prepare_rollout(rollout)
    sums = [x + 0.5 * y for x, y in zip(*(grouped_advantages(r).tolist() for r in (REWARDS, style)), strict=True)]
    mean = sum(sums) / 8
    std = math.sqrt(sum((x - mean) ** 2 for x in sums) / 7)
    torch.testing.assert_close(
        batch.advantages, torch.tensor([(x - mean) / (std + 1e-4) for x in sums]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler_ratio_max": 2.0}, "algorithm.sampler_correction: .*off"),
        (
            {"sampler_correction": "token_mask", "sampler_ratio_min": 3.0},
            "algorithm.sampler_ratio_min: 3.0 is not below the largest ratio 2.0",
        ),
        ({"normalize": "each", "scale_rewards": "none"}, "algorithm.normalize: .*scale_rewards=group"),
        ({"normalize": "each", "kl": "reward", "beta": 0.1}, "algorithm.normalize: .*algorithm.kl=k3_corrected"),
        ({"loss": "reinforce", "clip_eps": None, "clip_eps_high": None, "num_iterations": 2}, "in 2 steps"),
        ({"loss": "reinforce"}, "reinforce cannot use clip_eps"),
    ],
)
def test_options_that_contradict_are_refused(grpo, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        grpo(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"off_policy_max": 0.5}, "algorithm.off_policy_max: .*type algorithm.off_policy_max=null"),
        ({"loss": "gmpo"}, "gmpo takes one advantage per completion"),
        ({"loss": "sequence"}, "sequence takes one advantage per completion"),
    ],
)
def test_advantages_per_token_refuse_what_wants_one_per_completion(online, keys_of, changes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        online(ReinforcePP, group_size=4, microbatch_size=8, **(keys_of("reinforce_pp") | changes))
