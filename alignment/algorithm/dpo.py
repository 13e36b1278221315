"""Direct Preference Optimization."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch
from alignment.losses import dpo


class DPO(OfflineModule):
    """DPO (2305.18290) eq. 7; with label smoothing the conservative DPO of Mitchell's note."""

    data_form: ClassVar[str] = "pairs"
    reference_need: ClassVar[str] = "required"

    def __init__(self, *passed: Any, beta: float, label_smoothing: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.beta, self.label_smoothing = beta, label_smoothing

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch.ref_logprobs is not None
        logprobs = self.logprobs(batch).logprobs
        sums = torch.where(batch.loss_mask, logprobs - batch.ref_logprobs, 0.0).sum(-1)
        chosen, rejected = sums.view(-1, 2).unbind(1)
        values = dpo.sigmoid(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
        loss = self.example_mean(values, batch)
        self.log_loss(loss, batch, batch.step_examples)
        levels = torch.where(batch.loss_mask, logprobs, 0.0).detach().sum(-1).view(-1, 2)
        self.log_stats(dpo.pair_stats(chosen, rejected, beta=self.beta))
        self.log_stats({"logps/chosen": levels[:, 0], "logps/rejected": levels[:, 1]})
        return loss
