"""Supervised fine-tuning."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch
from alignment.losses.sft import dft, nll, smoothed_nll
from alignment.model.logprobs import padding


class SFT(OfflineModule):
    """Likelihood of the completions' tokens (loss_mask), as a mean over tokens or over examples.

    loss: negative log-likelihood, or DFT (2508.05629), which weighs each token by its own probability.
    label_smoothing: share of the target spread over the vocabulary (1512.00567), with nll. neftune_alpha: noise on the
    input embeddings while training (2310.05914). Held-out examples are measured without the noise.
    """

    data_form: ClassVar[str] = "demonstrations"

    def __init__(
        self,
        *passed: Any,
        loss: Literal["nll", "dft"],
        loss_mean: Literal["token", "example"],
        label_smoothing: float,
        neftune_alpha: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.loss, self.loss_mean = loss, loss_mean
        self.label_smoothing, self.neftune_alpha = label_smoothing, neftune_alpha

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.logprobs(
            batch,
            stats=["is_top1", "vocab_mean"] if self.label_smoothing else ["is_top1"],
            neftune_alpha=self.neftune_alpha if self.trainer.training else 0.0,
        )
        if self.loss == "dft":
            values = dft(scores.logprobs)
        elif scores.vocab_mean is not None:
            values = smoothed_nll(scores.logprobs, scores.vocab_mean, label_smoothing=self.label_smoothing)
        else:
            values = nll(scores.logprobs)
        return self._reduced(values, scores.logprobs, scores.is_top1, batch)

    def _reduced(self, values: Tensor, logprobs: Tensor, is_top1: Tensor | None, batch: Batch) -> Tensor:
        if self.loss_mean == "token":
            loss, count = self.token_mean(values, batch), batch.step_tokens
        else:
            rows = torch.where(batch.loss_mask, values, 0.0).sum(-1) / batch.loss_mask.sum(-1).clamp(min=1)
            loss, count = self.example_mean(rows, batch), batch.step_examples
        self.log_loss(loss, batch, count)
        assert self.policy is not None
        self.meter.add(f"{self.phase}/padding", *padding(self.policy, batch, path=self.source.shared_prompt))
        assert is_top1 is not None
        self.log_stats({"nll": nll(logprobs), "token_accuracy": is_top1}, batch.loss_mask)
        if not self.trainer.training:
            self.meter.exp_mean("val/perplexity", nll(logprobs), batch.loss_mask)
        return loss
