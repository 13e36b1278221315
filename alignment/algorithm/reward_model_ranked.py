"""Reward models from ranked lists."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.scoring import ScoringModule
from alignment.batch import Batch
from alignment.losses.plackett_luce import all_pairs, plackett_luce, ranking_stats


class RewardModelRanked(ScoringModule):
    """Plackett-Luce (2305.18290 App. A.3), or Bradley-Terry of all pairs of a list (2203.02155 eq. 1).

    center_coef: times (twice the mean score of a list)^2, which for two completions is `reward_model`'s.
    """

    data_form: ClassVar[str] = "ranked"

    def __init__(
        self, *passed: Any, loss: Literal["plackett_luce", "all_pairs"], center_coef: float, **common: Any
    ) -> None:
        super().__init__(*passed, **common)
        self.list_loss = {"plackett_luce": plackett_luce, "all_pairs": all_pairs}[loss]
        self.center_coef = center_coef

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.scores(batch).view(-1, batch.group_size)
        every = torch.ones_like(scores, dtype=torch.bool)
        values = self.list_loss(scores, every)
        if self.center_coef:
            values = values + self.center_coef * (2 * scores.mean(-1)) ** 2
        loss = self.example_mean(values, batch)
        self.log_loss(loss, batch, batch.step_examples)
        self.log_stats(ranking_stats(scores, every))
        better, worse = torch.triu_indices(batch.group_size, batch.group_size, 1)
        self.log_calibration(scores[:, better] - scores[:, worse])
        return loss
