"""Nash-MD: the policy learns to be preferred to a mixture of itself and the reference."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.online import nash_md
from alignment.losses.sampling import penalize_unfinished


class NashMD(OnlineModule):
    """Nash-MD-PG (2312.00886): one sample of the policy against one of the geometric mixture of policy and reference.

    The loss is `losses/online.py: nash_md` of the policy's sample, whose KL is the sequence's (ruling D17), as a mean
    over the samples; the mixture's sample is only its opponent. Where it ends: p(y) ~ reference(y) *
    exp(P(y beats the mixture) / beta), for mixture_coef 0 the Nash equilibrium of the KL-regularised preference.
    A prompt where either sample has no score leaves the loss and its mean.
    """

    reference_need: ClassVar[str] = "required"
    min_group: ClassVar[int] = 2
    rows_per_prompt: ClassVar[int | str] = 1
    reference_sample: ClassVar[bool] = True
    # Two models decode together, which no server does.
    samples_in_process: ClassVar[bool] = True

    def __init__(
        self,
        *passed: Any,
        beta: float,
        mixture_coef: float,
        preference: Literal["bradley_terry", "win"],
        missing_eos_penalty: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.mixture_coef, self.missing_eos_penalty = beta, mixture_coef, missing_eos_penalty
        self.win_prob = PREFERENCES[preference]
        if self.group_size != 2:
            raise UserError(
                "algorithm.group_size: a sample of the policy meets one of the mixture, "
                f"{self.group_size} is no pair: type algorithm.group_size=2"
            )
        if self.steps_per_rollout > 1:
            raise UserError(
                "algorithm.num_minibatches: the loss is for samples of the current policy, and a rollout is learned "
                f"from in {self.steps_per_rollout} steps: type 1 for num_iterations and num_minibatches"
            )

    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        assert rollout.rewards is not None
        assert rollout.finished is not None
        scores = penalize_unfinished(rollout.rewards, rollout.finished, penalty=self.missing_eos_penalty)
        win_prob = self.win_prob(*scores.view(-1, 2).unbind(1))
        own = rollout.select(2 * torch.arange(len(win_prob))[:, None])
        own.loss_mask = own.loss_mask & ~win_prob.isnan()[:, None]
        own.advantages = win_prob.nan_to_num(0.5) - 0.5
        self.meter.mean("rollout/win_prob", win_prob)
        return [batch.to(self.device) for batch in own.split(self.microbatch_size)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch.advantages is not None
        assert batch.ref_logprobs is not None
        logprobs = self.logprobs(batch).logprobs
        values, stats = nash_md(logprobs, batch.ref_logprobs, batch.loss_mask, batch.advantages + 0.5, beta=self.beta)
        used, count = batch.loss_mask.any(-1), batch.step_counts["seq_mean_token_sum"]
        loss = self.step_mean(torch.where(used, values, 0.0).sum(), count)
        self.log_loss(loss, batch, count)
        self.log_stats({"kl_seq": stats["kl"], "score_loss": stats["score_loss"]}, used)
        return loss


def bradley_terry(first: Tensor, second: Tensor) -> Tensor:
    """P(the first is preferred) as a reward model of that kind means its scores: sigmoid of their difference."""
    return torch.sigmoid(first - second)


def win(first: Tensor, second: Tensor) -> Tensor:
    """1 where the first scores more, 0 where less, 1/2 where equal; NaN where a score is missing."""
    gap = first - second
    return torch.where(gap.isnan(), gap, (gap.sign() + 1) / 2)


PREFERENCES = {"bradley_terry": bradley_terry, "win": win}
