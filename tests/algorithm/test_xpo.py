"""XPO: one sample of the policy, one of the reference, and the bonus on the latter's log-prob."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.algorithm.xpo import XPO
from alignment.callbacks.rollout import RolloutCallback
from alignment.errors import UserError
from alignment.reward.combine import RewardSet
from alignment.rollout.hf import Completions

LENGTHS = [[3, 5], [2, 6], [4, 2]]
REWARDS = [0.0, 1.0, 1.0, 0.25, 0.5, 0.5]  # the reference wins, the policy wins, a tie


def test_the_loss_is_that_of_the_loop_however_it_is_cut(online, keys_of, rollout_of, learn, tokens) -> None:
    results = []
    for size in (6, 2):
        module = online(XPO, **(keys_of("xpo") | {"alpha": 0.01, "microbatch_size": size, "num_prompts": 3}))
        rollout = rollout_of(LENGTHS, REWARDS)
        rollout.from_reference = torch.tensor([False, True] * 3)
        policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
        results.append(learn(module, module.prepare_rollout(rollout)))
    gaps = [sum(p) - sum(q) for p, q in zip(policy, reference, strict=True)]
    total = 0.0
    for chosen, rejected, of_reference in ((1, 0, 1), (2, 3, 3)):
        total += math.log1p(math.exp(-0.1 * (gaps[chosen] - gaps[rejected]))) + 0.01 * sum(policy[of_reference])
    for value, gradient, metrics in results:
        assert value == pytest.approx(total / 2, rel=1e-4)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)
        assert metrics["train/win_rate"] == 0.5
        assert metrics["train/xpo_loss"] == pytest.approx(0.01 * (sum(policy[1]) + sum(policy[3])) / 2, rel=1e-4)


class Engine:
    """The policy says 5, the reference 6; remembers the seeds."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def sync(self, policy) -> None: ...

    def generate(self, policy, prompts, *, group_size, seed, **settings) -> Completions:
        self.seeds.append(seed)
        assert group_size == 1
        token, length = (6, 3) if policy == "the reference" else (5, 2)
        rows = [[token] * (length + n) for n in range(len(prompts))]
        return Completions(rows, [[-0.5] * len(row) for row in rows], [True] * len(rows))


def test_one_of_each_is_sampled_and_scored(online, keys_of, rollout_of) -> None:
    module = online(XPO, **(keys_of("xpo") | {"microbatch_size": 2, "num_prompts": 3}))
    module.source.stop_ids = {2}
    module.source.tokenizer = SimpleNamespace(
        pad_token_id=0, batch_decode=lambda ids, skip_special_tokens: ["x" * len(row) for row in ids]
    )

    @contextmanager
    def scoring_model(policy: Any):
        yield "the reference"

    module.reference.scoring_model = scoring_model
    rewards = RewardSet({"characters": (lambda completions, rows: [float(len(c)) for c in completions], 1.0)})
    engine = Engine()
    prompts = rollout_of(LENGTHS, REWARDS).examples
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(prompts_for=lambda number: prompts),
        global_rank=0,
        global_step=0,
        precision_plugin=module.trainer.precision_plugin,
    )
    rollout = RolloutCallback(engine, rewards, seed=0).collect(trainer, module)
    assert rollout.group_size == 2
    assert rollout.prompt_mask.sum(-1).tolist() == [2, 3, 4]
    assert rollout.completion_ids[:, 0].tolist() == [5, 6] * 3
    assert rollout.rewards is not None
    assert rollout.rewards.tolist() == [2, 3, 3, 4, 4, 5]
    assert rollout.from_reference is not None
    assert rollout.from_reference.tolist() == [False, True] * 3
    assert len(set(engine.seeds)) == 2  # not the same randomness for both
    metrics = module.meter.flush()
    assert (metrics["rollout/reward"], metrics["rollout/reference_reward"]) == (3, 4)


def test_a_pair_is_two(online, keys_of) -> None:
    with pytest.raises(UserError, match=r"algorithm\.group_size: .*type algorithm\.group_size=2"):
        online(XPO, **(keys_of("xpo") | {"group_size": 4, "microbatch_size": 2}))
