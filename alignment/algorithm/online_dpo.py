"""Online DPO: pairs from the policy's own samples, as the reward orders them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule, refusal
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.dpo import Pairs, pair_loss, pair_stats, pairs_from_tokens
from alignment.losses.online import pair_by_score
from alignment.losses.sampling import penalize_unfinished


class OnlineDPO(OnlineModule):
    """Online DPO (2402.04792): of each prompt's samples the best is chosen and the worst rejected, then DPO.

    Equal or missing scores make no pair (ruling D25): such a prompt leaves the loss and its mean.
    """

    reference_need: ClassVar[str] = "required"
    min_group: ClassVar[int] = 2
    rows_per_prompt: ClassVar[int | str] = 2

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: Literal["sigmoid", "ipo", "hinge", "robust", "sigmoid_norm"],
        label_smoothing: float,
        length_average: bool | None,
        missing_eos_penalty: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.missing_eos_penalty = beta, missing_eos_penalty
        try:
            options = {"label_smoothing": label_smoothing or None, "length_average": length_average}
            self.pair_loss = pair_loss(loss, beta=beta, **options)
        except ValueError as error:
            raise refusal(error) from error
        if self.microbatch_size % 2:
            raise UserError(
                "algorithm.microbatch_size: the two answers of a pair are learned from together: type "
                f"algorithm.microbatch_size={self.microbatch_size + 1}"
            )

    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        assert rollout.rewards is not None
        assert rollout.finished is not None
        scores = penalize_unfinished(rollout.rewards, rollout.finished, penalty=self.missing_eos_penalty)
        pairing = pair_by_score(scores, self.group_size)
        pairs = rollout.select(torch.stack([pairing.chosen, pairing.rejected], 1))
        pairs.loss_mask = pairs.loss_mask & (pairing.weight > 0).repeat_interleave(2)[:, None]
        self.meter.mean("rollout/scores_margin", pairing.margin)
        self.meter.mean("rollout/ties", (pairing.weight == 0).float())
        return [batch.to(self.device) for batch in pairs.split(self.microbatch_size)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.logprobs(batch).logprobs
        assert batch.ref_logprobs is not None
        pairs = pairs_from_tokens(logprobs, batch.ref_logprobs, batch.loss_mask)
        used = batch.loss_mask.any(-1)[::2]
        num_pairs = batch.step_counts["seq_mean_token_mean"] / 2
        values, stats = self.pair_losses(pairs, logprobs, batch)
        loss = self.step_mean(torch.where(used, values, 0.0).sum(), num_pairs)
        self.log_loss(loss, batch, num_pairs)
        self.log_stats(pair_stats(pairs, beta=self.beta) | stats, used)
        return loss

    def pair_losses(self, pairs: Pairs, logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,), and what to log of them."""
        return self.pair_loss(pairs), {}
