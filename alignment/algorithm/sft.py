"""Supervised fine-tuning."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch
from alignment.losses.sft import nll


class SFT(OfflineModule):
    """Negative log-likelihood of the completions' tokens (loss_mask), as a mean over tokens or over examples."""

    data_form: ClassVar[str] = "demonstrations"

    def __init__(self, *passed: Any, loss_mean: Literal["token", "example"], **common: Any) -> None:
        super().__init__(*passed, **common)
        self.loss_mean = loss_mean

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        values = nll(self.logprobs(batch).logprobs)
        if self.loss_mean == "token":
            loss, count = self.token_mean(values, batch), batch.step_tokens
        else:
            rows = torch.where(batch.loss_mask, values, 0.0).sum(-1) / batch.loss_mask.sum(-1).clamp(min=1)
            loss, count = self.example_mean(rows, batch), batch.step_examples
        self.log_loss(loss, batch, count)
        self.log_stats({"nll": values}, batch.loss_mask)
        return loss
