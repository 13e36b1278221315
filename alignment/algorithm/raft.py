"""RAFT: learn the best of many samples by heart, then sample again."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.selection import selected_mask, top_k
from alignment.losses.sft import nll


class RAFT(OnlineModule):
    """RAFT (2304.06767): the negative log-likelihood of the best `num_kept` samples of each prompt, as a mean over the
    step's tokens. num_kept=1 is best-of-n; a threshold makes it rejection sampling.

    What is not kept is not computed. A kept sample without a score, or of a prompt whose best is below the threshold,
    counts for nothing.
    """

    min_group: ClassVar[int] = 2
    rows_per_prompt: ClassVar[int | str] = "num_kept"

    def __init__(self, *passed: Any, num_kept: int, threshold: float | None, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.num_kept, self.threshold = num_kept, -math.inf if threshold is None else threshold
        if not 1 <= num_kept <= self.group_size:
            raise UserError(
                f"algorithm.num_kept: {num_kept} of {self.group_size} samples cannot be kept: type "
                f"algorithm.num_kept=1, or more up to {self.group_size}"
            )

    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        assert rollout.rewards is not None
        rows, kept = top_k(rollout.rewards.view(-1, self.group_size), self.num_kept, threshold=self.threshold)
        first = torch.arange(len(rows))[:, None] * self.group_size
        chosen = rollout.select(first + rows)
        chosen.loss_mask = selected_mask(chosen.loss_mask, kept.flatten())
        assert chosen.rewards is not None
        self.meter.mean("rollout/kept", kept.float())
        self.meter.mean("rollout/kept_reward", torch.where(kept.flatten(), chosen.rewards, torch.nan))
        return [batch.to(self.device) for batch in chosen.split(self.microbatch_size)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        values = nll(self.logprobs(batch).logprobs)
        loss = self.token_mean(values, batch)
        self.log_loss(loss, batch, batch.step_tokens)
        self.log_stats({"nll": values}, batch.loss_mask)
        return loss
