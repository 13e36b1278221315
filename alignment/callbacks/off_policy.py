"""Pairs that the reference would not have written: told once, after the first step, with what to do."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment.batch import Batch

log = logging.getLogger("alignment")

# Nats per token: e times less likely, token by token, than what it is compared with.
GAP = 1.0
CHOSEN, REJECTED, OWN = range(3)


class OffPolicyWatch(L.Callback):
    """Compares the reference's mean log-prob per token of chosen and rejected answers with that of its own samples.

    On-policy pairs and samples differ by chance alone. Where both answers are far below, DPO moves probability between
    texts that the model never says, and what it does say is pulled along; where only the chosen are, their likelihood
    tends to fall with that of the rejected (2410.08847). The pairs are those of the first step, the samples those of
    the evaluation before it, when policy and reference are the same; without samples, only the second is told.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, 2, dtype=torch.float64)  # of each: log-probs, tokens
        self.told = False

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if module.data_form == "pairs" and module.step == 0 and batch.texts and batch.ref_logprobs is not None:
            self._add(OWN, batch.ref_logprobs, batch.completion_mask)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        if module.data_form == "pairs" and trainer.global_step == 0 and batch.ref_logprobs is not None:
            for side in (CHOSEN, REJECTED):
                self._add(side, batch.ref_logprobs[side::2], batch.loss_mask[side::2])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.told or module.data_form != "pairs" or not module.needs_reference or trainer.global_step == 0:
            return
        self.told = True
        sums = trainer.strategy.reduce(self.sums.to(module.device, torch.float32), reduce_op="sum").cpu()
        if trainer.is_global_zero and sums[CHOSEN, 1] and sums[REJECTED, 1]:
            tell(*(sums[:, 0] / sums[:, 1]).tolist())

    def _add(self, row: int, logprobs: Tensor, mask: Tensor) -> None:
        total = torch.where(mask, logprobs, 0.0).sum(dtype=torch.float64)
        self.sums[row] += torch.stack([total, mask.sum()]).cpu()


def tell(chosen: float, rejected: float, own: float) -> None:
    """Log the means, and a warning where they lie far apart. `own` is NaN where nothing was sampled."""
    samples = "" if math.isnan(own) else f", its own samples {own:.2f}"
    means = f"log-probs per token under the reference: chosen {chosen:.2f}, rejected {rejected:.2f}{samples}"
    todo = "learn the chosen answers first (algorithm=sft), or take pairs of answers that this model sampled"
    if own - max(chosen, rejected) >= GAP:
        log.warning("the pairs are off-policy for this reference; %s: %s", means, todo)
    elif rejected - chosen >= GAP:
        log.warning("the reference would say the rejected answers, not the chosen ones; %s: %s", means, todo)
    else:
        log.info("%s", means)
