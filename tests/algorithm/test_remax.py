"""ReMax: the score to go, less the greedy completion's."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from alignment.algorithm.remax import ReMax
from alignment.callbacks.rollout import RolloutCallback
from alignment.reward.combine import RewardSet
from alignment.rollout.hf import Completions

LENGTHS = [[3, 5], [2, 6], [4, 1]]
REWARDS = [1.0, 0.0, 0.5, math.nan, 1.0, 1.0]


@pytest.mark.parametrize("size", [6, 1])
def test_advantages_are_rewards_to_go_less_the_greedy_score(online, keys_of, rollout_of, tokens, size: int) -> None:
    module = online(ReMax, group_size=2, microbatch_size=size, **keys_of("remax"))
    rollout = rollout_of(LENGTHS, REWARDS)
    rollout.greedy_rewards = torch.tensor([0.5, 0.5, 0.0, 0.0, math.nan, math.nan])
    policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
    expected = torch.zeros(6, 6)
    for n, greedy in ((0, 0.5), (1, 0.5), (2, 0.0)):  # 3 has no score; the prompt of 4 and 5 no greedy one
        gaps = [p - q for p, q in zip(policy[n], reference[n], strict=True)]
        for t in range(len(gaps)):
            expected[n, t] = REWARDS[n] - 0.05 * sum(gaps[t:]) - greedy
    batches = module.prepare_rollout(rollout)
    found = torch.cat([batch.advantages for batch in batches])
    mask = torch.cat([batch.loss_mask for batch in batches])
    torch.testing.assert_close(found * mask, expected, rtol=1e-4, atol=1e-5)
    assert not mask[3].any()


class Engine:
    """Sampled completions have the length of their number, greedy ones one token more than the prompt's number."""

    def sync(self, policy) -> None: ...

    def generate(self, policy, prompts, *, group_size, temperature, **settings) -> Completions:
        count = len(prompts) * group_size
        lengths = [n + 2 for n in range(count)] if temperature == 0 else [n + 1 for n in range(count)]
        return Completions([[5] * n for n in lengths], [[-1.0] * n for n in lengths], [True] * count)


def test_one_greedy_completion_per_prompt_is_sampled_and_scored(online, keys_of, rollout_of) -> None:
    module = online(ReMax, group_size=2, microbatch_size=6, **(keys_of("remax") | {"beta": 0.0}))
    module.source.stop_ids = {2}
    module.source.tokenizer = SimpleNamespace(
        pad_token_id=0, batch_decode=lambda ids, skip_special_tokens: ["x" * len(row) for row in ids]
    )
    rewards = RewardSet({"characters": (lambda completions, rows: [float(len(c)) for c in completions], 1.0)})
    callback = RolloutCallback(Engine(), rewards, seed=0)
    filled: list = []
    prompts = rollout_of(LENGTHS, REWARDS).examples
    data = SimpleNamespace(
        prompts_for=lambda number: prompts,
        rollouts=SimpleNamespace(fill=lambda batches, sampled: filled.extend(batches)),
    )
    trainer = SimpleNamespace(
        datamodule=data,
        global_rank=0,
        global_step=0,
        accumulate_grad_batches=1,
        precision_plugin=module.trainer.precision_plugin,
        strategy=module.trainer.strategy,
    )
    callback.on_train_epoch_start(trainer, module)
    (batch,) = filled
    assert batch.rewards.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.greedy_rewards.tolist() == [2, 2, 3, 3, 4, 4]
    # advantage: (1, 2) - 2, (3, 4) - 3, (5, 6) - 4 on every token
    assert batch.advantages[:, 0].tolist() == [-1, 0, 0, 1, 1, 2]
    assert module.meter.flush()["rollout/greedy_reward"] == 3
