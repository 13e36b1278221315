"""What algorithms that learn from single answers with a label share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch, Example
from alignment.data.datamodule import OfflineData
from alignment.losses.reduce import sequence_logprobs


def labels(examples: Sequence[Example]) -> list[bool]:
    """Which of the examples are desirable."""
    return [bool(example.columns["label"]) for example in examples]


class UnpairedModule(OfflineModule):
    """One completion per prompt, desirable or not. Metrics call the desirable ones chosen, the others rejected."""

    data_form: ClassVar[str] = "unpaired"
    reference_need: ClassVar[str] = "required"

    @property
    def data(self) -> OfflineData:
        trainer: Any = self.trainer
        return trainer.datamodule

    def sums(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) each: log-probs of the completions under policy and reference, and whether they are desirable.

        On held-out data the policy's entropy is logged too; in training it would cost a pass over the logits.
        """
        assert batch.ref_logprobs is not None
        scores = self.logprobs(batch, stats=[] if self.trainer.training else ["entropy"])
        if scores.entropy is not None:
            self.log_stats({"entropy": scores.entropy}, batch.loss_mask)
        policy, reference = (sequence_logprobs(x, batch.loss_mask) for x in (scores.logprobs, batch.ref_logprobs))
        return policy, reference, torch.tensor(labels(batch.examples), device=policy.device)

    def unpaired_mean(self, values: Tensor, stats: dict[str, Tensor], desirable: Tensor, batch: Batch) -> Tensor:
        """The step's mean over all rows of both classes; logs it, the statistics, and how many rows each class had."""
        loss = self.example_mean(values, batch)
        self.log_loss(loss, batch, batch.step_examples)
        self.log_stats(stats)
        if self.trainer.training:
            self.meter.total("train/num_chosen", float(desirable.sum()))
            self.meter.total("train/num_rejected", float((~desirable).sum()))
        return loss

    def _log(self, metrics: dict[str, float]) -> None:
        """The margin is the difference of the class means, absent where a class is."""
        for phase in ("train", "val"):
            means = [metrics.get(f"{phase}/rewards/{side}") for side in ("chosen", "rejected")]
            if None not in means:
                metrics[f"{phase}/rewards/margins"] = means[0] - means[1]  # type: ignore[operator]
        super()._log(metrics)
