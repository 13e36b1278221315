"""Reward models by regression on numbers that say how good a completion is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithm.scoring import ScoringModule
from alignment.batch import Batch
from alignment.losses.reward_model import regression


class RewardModelScored(ScoringModule):
    """Squared error to each completion's own score, as with ratings (HelpSteer, 2311.09528) or right and wrong."""

    data_form: ClassVar[str] = "scored"

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.scores(batch)
        targets = torch.tensor([float(row.columns["score"]) for row in batch.examples], device=scores.device)
        values, stats = regression(scores, targets)
        loss = self.example_mean(values, batch)
        self.log_loss(loss, batch, batch.step_examples)
        self.log_stats(stats)
        return loss
