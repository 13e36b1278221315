"""What algorithms that learn from pairs share."""

from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch
from alignment.losses.dpo import Pairs, pair_stats, pairs_from_tokens
from alignment.losses.reduce import masked_mean


class PairModule(OfflineModule):
    """Rows alternate chosen, rejected. Reference-free algorithms see a reference whose log-probs are 0."""

    data_form: ClassVar[str] = "pairs"

    def pairs(self, logprobs: Tensor, batch: Batch, *, ld_alpha: float = 1.0) -> Pairs:
        """Sums and lengths of each side; logs the implicit rewards and the levels of both sides."""
        reference = batch.ref_logprobs if self.needs_reference else None
        reference = torch.zeros_like(logprobs) if reference is None else reference
        pairs = pairs_from_tokens(logprobs, reference, batch.loss_mask, ld_alpha=ld_alpha)
        self.log_stats(pair_stats(pairs, beta=self.beta))
        return pairs

    def pair_mean(self, values: Tensor, logprobs: Tensor, batch: Batch, *, nll_weight: float) -> Tensor:
        """The step's mean over pairs, plus `nll_weight` times the chosen answers' mean NLL over the step's tokens."""
        loss = self.example_mean(values, batch)
        if nll_weight:
            loss = loss + nll_weight * self._chosen_nll(logprobs, batch)
        self.log_loss(loss, batch, batch.step_examples)
        return loss

    def _chosen_nll(self, logprobs: Tensor, batch: Batch) -> Tensor:
        chosen = torch.arange(len(logprobs), device=logprobs.device) % 2 == 0
        mask = batch.loss_mask & chosen[:, None]
        self.log_stats({"nll_chosen": masked_mean(-logprobs, mask, -1)[chosen]})
        return self.step_mean(torch.where(mask, -logprobs, 0.0).sum(), batch.step_chosen_tokens)
