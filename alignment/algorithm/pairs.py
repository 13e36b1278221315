"""What algorithms that learn from preferences share, and those from pairs."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.algorithm.displacement import DisplacementWatch
from alignment.batch import Batch
from alignment.losses.dpo import Pairs, pair_stats, pairs_from_tokens
from alignment.losses.reduce import masked_mean
from alignment.model.logprobs import TokenScores

log = logging.getLogger("alignment")


class PreferenceModule(OfflineModule):
    """Answers of one prompt, some better than others: metrics, and the watch for likelihood displacement."""

    # Implicit rewards in the logs are of averages per token, as in losses of averages.
    rewards_per_token: bool = False

    def __init__(self, *passed: Any, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.displacement = DisplacementWatch()

    def scores(self, batch: Batch, *stats: str) -> TokenScores:
        """The policy's log-probs; on held-out data also its entropy, which in training would cost a pass over the
        logits."""
        entropy = [] if self.trainer.training else ["entropy"]
        scores = self.logprobs(batch, stats=[*stats, *entropy])
        if scores.entropy is not None:
            self.log_stats({"entropy": scores.entropy}, batch.loss_mask)
        return scores

    def log_pairs(self, pairs: Pairs) -> None:
        """The implicit rewards and the levels of both sides."""
        self.log_stats(pair_stats(pairs, beta=self.beta, per_token=self.rewards_per_token))

    # ---- likelihood displacement ----------------------------------------------------------------------------------
    def _log(self, metrics: dict[str, float]) -> None:
        super()._log(metrics)
        if "train/rewards/margins" in metrics:
            self._watch(metrics)

    def _watch(self, metrics: dict[str, float]) -> None:
        """A fixed reference cancels what answers of a batch differ by; a missing or moving one would hide a fall."""
        fixed = self.needs_reference and not self.reference.moves and self.beta > 0 and not self.rewards_per_token
        level = metrics["train/rewards/chosen"] / self.beta if fixed else metrics["train/logps/chosen"]
        found = self.displacement.add(level, metrics["train/rewards/margins"])
        if found and self.trainer.is_global_zero:
            what = "log-ratio of the chosen answers to the reference" if fixed else "log-prob of the chosen answers"
            log.warning(
                "likelihood displacement at step %d: the %s fell from %.2f to %.2f while margins rise. To hold it up: "
                "algorithm.lr=%g (a third)%s",
                self.step,
                what,
                *found,
                self.lr / 3,
                self._likelihood_remedy(),
            )

    def _likelihood_remedy(self) -> str:
        weight = getattr(self, "nll_weight", None)
        if weight is None:
            return ", or algorithm=rpo or algorithm=irpo, which also learn the chosen answers"
        return f", or algorithm.nll_weight={10 * weight or 1.0:g}, which also learns the chosen answers (RPO, IRPO)"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["displacement"] = self.displacement.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.displacement.load_state_dict(checkpoint["displacement"])


class PairModule(PreferenceModule):
    """Rows alternate chosen, rejected. Reference-free algorithms see a reference whose log-probs are 0."""

    data_form: ClassVar[str] = "pairs"
    # What the likelihood term is called in the logs.
    nll_name: ClassVar[str] = "nll_chosen"

    def pairs(self, logprobs: Tensor, batch: Batch, *, ld_alpha: float = 1.0) -> Pairs:
        """Sums and lengths of each side, logged."""
        reference = batch.ref_logprobs if self.needs_reference else None
        reference = torch.zeros_like(logprobs) if reference is None else reference
        pairs = pairs_from_tokens(logprobs, reference, batch.loss_mask, ld_alpha=ld_alpha)
        self.log_pairs(pairs)
        return pairs

    def pair_mean(self, values: Tensor, logprobs: Tensor, batch: Batch, *, nll_weight: float) -> Tensor:
        """The step's mean over pairs, plus `nll_weight` times the mean NLL, over the step's tokens, of each prompt's
        first answer: the chosen one of a pair."""
        loss = self.example_mean(values, batch)
        if nll_weight:
            loss = loss + nll_weight * self._first_nll(logprobs, batch)
        self.log_loss(loss, batch, batch.step_examples)
        return loss

    def _first_nll(self, logprobs: Tensor, batch: Batch) -> Tensor:
        first = torch.arange(len(logprobs), device=logprobs.device) % batch.group_size == 0
        mask = batch.loss_mask & first[:, None]
        self.log_stats({self.nll_name: masked_mean(-logprobs, mask, -1)[first]})
        return self.step_mean(torch.where(mask, -logprobs, 0.0).sum(), batch.step_chosen_tokens)
