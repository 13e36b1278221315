"""On-policy steps of an offline run: the completions of the dataset give way to the policy's own."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from alignment.batch import Batch
from alignment.callbacks.rollout import RolloutCallback, count_step_tokens


class StudentSamples(L.Callback):
    """With probability `module.on_policy_share` an optimizer step learns from samples of its own prompts.

    One coin per step, the same on every rank, from (seed, step) alone: so a resumed run throws the same ones. The
    prompts of all microbatches are completed before the first of them is learned from, since a mean over the tokens of
    the step needs their number; and together, so that the samples do not depend on the cut.
    """

    def __init__(self, rollout: RolloutCallback) -> None:
        self.rollout = rollout
        self._waiting: list[Batch] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        share = getattr(module, "on_policy_share", 0.0)
        if not coin(self.rollout.seed, trainer.global_step) < share:
            return
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._waiting = self._sample_step(trainer, module, trainer.global_step)
        vars(batch).update(vars(self._waiting.pop(0).to(module.device)))

    def _sample_step(self, trainer: Any, module: Any, step: int) -> list[Batch]:
        """The microbatches of a step on this rank, with completions of the policy."""
        steps = trainer.datamodule.steps
        indices = range(step * steps.num_microbatches, (step + 1) * steps.num_microbatches)
        examples = [example for index in indices for example in steps[index].examples]
        sampled = self.rollout.complete(trainer, module, examples, 1, seed=step)
        module.meter.mean("train/sampled_length", sampled.completion_mask.sum(-1).float())
        assert sampled.finished is not None
        module.meter.mean("train/sampled_finished", sampled.finished.float())
        microbatches = sampled.split(steps.microbatch_size)
        count_step_tokens(trainer, microbatches)
        return microbatches


def coin(seed: int, step: int) -> float:
    """Uniform in [0, 1), from (seed, step) alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    return float(torch.rand((), generator=generator, dtype=torch.float64))
