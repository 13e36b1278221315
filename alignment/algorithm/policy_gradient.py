"""What algorithms share that weigh the log-probs of their own samples by advantages."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.grpo import FUNCTIONS, POLICY_LOSSES, Result
from alignment.losses.options import choose
from alignment.losses.reduce import reduce_loss

PolicyLossName = Literal[
    "grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo", "cispo", "sapo", "vespo", "gmpo"
]
ReductionName = Literal[
    "token_mean",
    "microbatch_token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "row_mean_token_sum",
    "constant",
]


class PolicyGradientModule(OnlineModule):
    """A loss of `losses/grpo.py` and a reduction; a subclass adds its advantages, and what joins the loss per token.

    What is None is as the loss's paper has it; what the chosen loss cannot use is refused.
    """

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: PolicyLossName,
        reduction: ReductionName | None,
        clip_eps: float | None,
        clip_eps_high: float | None,
        delta: float | None,
        is_weight_min: float | None,
        is_weight_max: float | None,
        tau_pos: float | None,
        tau_neg: float | None,
        k_pos: float | None,
        lambda_pos: float | None,
        k_neg: float | None,
        lambda_neg: float | None,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta = beta
        options = {"clip_eps": clip_eps, "clip_eps_high": clip_eps_high, "delta": delta}
        options |= {"is_weight_min": is_weight_min, "is_weight_max": is_weight_max}
        options |= {"tau_pos": tau_pos, "tau_neg": tau_neg, "k_pos": k_pos, "k_neg": k_neg}
        options |= {"lambda_pos": lambda_pos, "lambda_neg": lambda_neg}
        try:
            self.policy_loss = choose(FUNCTIONS, loss, **options)
            self.policy_loss(
                torch.zeros(1, 1), None, torch.zeros(1), torch.ones(1, 1, dtype=torch.bool)
            )  # its own checks
        except ValueError as error:
            raise UserError(f"algorithm.loss: {error}") from error
        self.reduction = reduction or POLICY_LOSSES[loss].reduction

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.logprobs(batch).logprobs
        values, stats = self.token_losses(logprobs, batch)
        loss = self.reduce(values, batch)
        self.log_loss(loss, batch, batch.step_counts[self.reduction])
        self.log_stats(stats, batch.loss_mask)
        return loss

    def token_losses(self, logprobs: Tensor, batch: Batch) -> Result:
        """(N, C), not reduced."""
        assert batch.advantages is not None
        return self.policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)

    def reduce(self, values: Tensor, batch: Batch) -> Tensor:
        """This microbatch's share of the step's loss."""
        return reduce_loss(
            values,
            batch.loss_mask,
            self.reduction,
            max_tokens=self.max_new_tokens if self.reduction == "constant" else None,
            count=batch.step_counts[self.reduction],
            scale=self._step_scale(),
        )
