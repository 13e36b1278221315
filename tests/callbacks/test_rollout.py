"""Dynamic sampling: which groups a rollout ends up with, and that it goes on where a checkpoint says."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.algorithm.meter import Meter
from alignment.batch import Batch, Example, collate, concat
from alignment.callbacks.rollout import (
    EVALUATION_SEED,
    REFERENCE_SEED,
    RolloutCallback,
    first_informative,
    rank_seed,
)

# Rewards of the two completions of prompts 0, 1, 2, ...; a prompt says something where they differ.
REWARDS = [(1, 1), (0, 1), (0, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 0), (1, 0), (1, 1)]


class Drawn(RolloutCallback):
    """Samples that are known: completion k of prompt p is p + 3 tokens, all equal to p."""

    def __init__(self) -> None:
        super().__init__(engine=None, rewards=None, seed=0)
        self.seeds: list[int] = []

    def sample(self, trainer, module, examples, group_size, *, seed, temperature=None) -> Batch:
        self.seeds.append(seed)
        numbers = [int(example.id) for example in examples]
        rows = [Example([1] * (p + 1), [[p] * (p + 3)] * 2, None, {}, str(p)) for p in numbers]
        batch = collate(rows)
        batch.rewards = torch.tensor([r for p in numbers for r in REWARDS[p]], dtype=torch.float32)
        batch.finished = torch.ones(len(batch), dtype=torch.bool)
        batch.texts = [f"{p}{k}" for p in numbers for k in "ab"]
        batch.parts = {"x": batch.rewards * 10}
        return batch


def setting(max_draws: int) -> tuple[Any, Any]:
    """Two prompts a draw, in their order."""
    examples = [Example([1], id=str(p)) for p in range(len(REWARDS))]
    data = SimpleNamespace(prompts_for=lambda number: examples[2 * number : 2 * number + 2])
    strategy = SimpleNamespace(root_device="cpu", reduce=lambda value, reduce_op: value)
    module = SimpleNamespace(
        max_draws=max_draws, group_size=2, greedy_baseline=False, reference_sample=False, meter=Meter()
    )
    return SimpleNamespace(datamodule=data, strategy=strategy), module


def ids(batch: Batch) -> list[str]:
    return [example.id for example in batch.examples]


def test_groups_of_equal_rewards_are_replaced_by_those_of_further_prompts() -> None:
    """Prompts 0 and 1, then 2 and 3: 1 and 3 differ, so two draws are enough. Next 4 and 5, 6 and 7, 8 and 9."""
    callback, (trainer, module) = Drawn(), setting(5)
    first = callback.collect(trainer, module)
    assert ids(first) == ["1", "3"]
    assert first.texts == ["1a", "1b", "3a", "3b"]
    assert first.rewards is not None
    assert first.rewards.tolist() == [0, 1, 1, 0]
    assert first.parts["x"].tolist() == [0, 10, 10, 0]
    assert first.completion_mask.sum(-1).tolist() == [4, 4, 6, 6]
    assert first.prompt_mask.sum(-1).tolist() == [2, 4]
    assert bool(first.prompt_mask[:, -1].all())  # padded on the left
    assert ids(callback.collect(trainer, module)) == ["5", "8"]
    assert callback.seeds == [0, 1, 2, 3, 4]  # never the same randomness twice
    metrics = module.meter.flush()
    assert metrics["rollout/draws"] == 2.5
    assert metrics["rollout/informative"] == pytest.approx(4 / 10)
    assert metrics["rollout/reward"] == pytest.approx(sum(map(sum, REWARDS)) / 20)  # of all that was sampled


def test_after_the_last_draw_others_fill_up_and_a_warning_says_so_once(caplog) -> None:
    callback, (trainer, module) = Drawn(), setting(1)
    assert ids(callback.collect(trainer, module)) == ["0", "1"]  # one draw: as it is
    callback, (trainer, module) = Drawn(), setting(2)
    callback.num_draws = 2
    with caplog.at_level(logging.WARNING, "alignment"):
        assert ids(callback.collect(trainer, module)) == ["5", "4"]
        callback.num_draws = 2
        callback.collect(trainer, module)
    assert len(caplog.records) == 1
    assert "only 1 of 2 groups differ in reward after 2 draws: raise algorithm.max_draws" in caplog.text


def test_another_rank_that_is_short_makes_this_one_draw_on() -> None:
    callback, (trainer, module) = Drawn(), setting(3)
    shortages = iter([1.0, 1.0, 0.0])
    trainer.strategy.reduce = lambda value, reduce_op: value + next(shortages)
    callback.collect(trainer, module)
    assert callback.num_draws == 3


def test_a_resumed_run_takes_the_prompts_that_come_next() -> None:
    whole, (trainer, module) = Drawn(), setting(5)
    whole.collect(trainer, module)
    resumed = Drawn()
    resumed.load_state_dict(whole.state_dict())
    assert ids(resumed.collect(trainer, module)) == ids(whole.collect(trainer, module)) == ["5", "8"]
    assert resumed.seeds == whole.seeds[2:]


def test_where_too_few_differ_the_first_of_the_others_fill_up() -> None:
    """1, 3, 5 and 8 differ; 0 is the first that does not. Prompts stay with their draw."""
    callback, (trainer, module) = Drawn(), setting(5)
    drawn = [callback.draw(trainer, module) for _ in range(5)]
    assert ids(first_informative(drawn, 5)) == ["1", "0", "3", "5", "8"]


def test_no_two_purposes_share_their_randomness() -> None:
    """The generators that the seeds start give different numbers, also for neighbouring runs, rollouts and ranks."""
    numbers = [0, 1, 2, EVALUATION_SEED, EVALUATION_SEED + 1, REFERENCE_SEED, REFERENCE_SEED + 1]
    seeds = [rank_seed(seed, number, rank) for seed in (0, 1) for number in numbers for rank in (0, 1)]
    assert len(set(seeds)) == len(seeds) == 28


def test_concat_pads_prompts_left_and_completions_right() -> None:
    one, two = collate([Example([1], [[2, 3]])]), collate([Example([4, 5, 6], [[7]])])
    one.old_logprobs, two.old_logprobs = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0]])
    both = concat([one, two])
    assert both.prompt_ids.tolist() == [[0, 0, 1], [4, 5, 6]]
    assert both.prompt_mask.tolist() == [[False, False, True], [True] * 3]
    assert both.completion_ids.tolist() == [[2, 3], [7, 0]]
    assert both.completion_mask.tolist() == [[True, True], [True, False]]
    assert both.old_logprobs is not None
    assert both.old_logprobs.tolist() == [[-1, -2], [-3, 0]]
    assert len(one) == 1
