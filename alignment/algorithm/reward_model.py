"""Reward models from pairs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.scoring import ScoringModule, numbers
from alignment.batch import Batch, Example
from alignment.errors import UserError
from alignment.losses.reward_model import bradley_terry, margin_accuracy


class RewardModel(ScoringModule):
    """Bradley-Terry (2203.02155 eq. 1) on scores at the last token of chosen and rejected.

    center_coef: "Helping or Herding" (2312.09244). label_smoothing: share of pairs taken as mislabelled. margin_column,
    prob_chosen_column: columns of the data with a margin (Llama 2, 2307.09288 eq. 2), with a soft label.
    """

    data_form: ClassVar[str] = "pairs"

    def __init__(
        self,
        *passed: Any,
        center_coef: float,
        label_smoothing: float,
        margin_column: str | None,
        prob_chosen_column: str | None,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        if label_smoothing and prob_chosen_column is not None:
            raise UserError(
                "algorithm.label_smoothing: the soft labels of algorithm.prob_chosen_column say it for each pair: type "
                "algorithm.label_smoothing=0"
            )
        self.center_coef, self.label_smoothing = center_coef, label_smoothing
        self.margin_column, self.prob_chosen_column = margin_column, prob_chosen_column

    def on_fit_start(self) -> None:
        """A row without its number is told before the first step, not in the middle of a run."""
        self._margins(self.trainer.datamodule.train)  # pyright: ignore[reportAttributeAccessIssue]
        self._probs(self.trainer.datamodule.train)  # pyright: ignore[reportAttributeAccessIssue]

    def _margins(self, examples: list[Example]) -> list[float] | None:
        return None if self.margin_column is None else numbers(examples, self.margin_column, "margin_column")

    def _probs(self, examples: list[Example]) -> list[float] | None:
        column = self.prob_chosen_column
        return None if column is None else numbers(examples, column, "prob_chosen_column", share=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.scores(batch)
        chosen, rejected = scores.view(-1, 2).unbind(-1)
        margins, probs = self._margins(batch.examples), self._probs(batch.examples)
        margin = None if margins is None else torch.tensor(margins, device=scores.device)
        prob = 1.0 - self.label_smoothing if probs is None else torch.tensor(probs, device=scores.device)
        values, stats = bradley_terry(chosen, rejected, margin=margin, prob_chosen=prob, center_coef=self.center_coef)
        loss = self.example_mean(values, batch)
        self.log_loss(loss, batch, batch.step_examples)
        self.log_stats(stats)
        self.log_calibration(stats["margin"])
        if margin is not None:
            self.log_stats({"margin_accuracy": margin_accuracy(chosen, rejected, margin)})
        return loss
