"""What algorithms share that train a score instead of a policy that speaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch, Example
from alignment.errors import UserError
from alignment.losses.reward_model import NUM_BINS, calibration_error, calibration_gaps
from alignment.model.scorer import completion_scores

# Sums that only serve to compute a metric at the end of a step or an evaluation.
SQUARE, BIN = "rewards/square", "calibration/"


class ScoringModule(OfflineModule):
    """A model with a head of scores. It has no reference, whatever `ref_strategy` is, and nothing is sampled."""

    samples: ClassVar[bool] = False
    # Labels of the head, and whether it stands at every token or at a completion's end.
    num_labels: ClassVar[int] = 1
    per_token: ClassVar[bool] = False

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = self.source.scorer(self.num_labels, per_token=self.per_token)

    def scores(self, batch: Batch) -> Tensor:
        """(N,) float32, one for each completion; logs their mean and spread."""
        assert self.policy is not None, "configure_model() comes first"
        with self.trainer.precision_plugin.forward_context():
            scores = completion_scores(self.policy, batch, path=self.source.shared_prompt)
        batch.rewards = scores.detach()
        self.log_stats({"rewards/mean": scores, SQUARE: batch.rewards.double() ** 2})
        return scores

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Held-out completions are kept with their scores, where others keep what they sampled."""
        super().validation_step(batch, batch_idx, dataloader_idx)
        ids = [row[mask].tolist() for row, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]
        batch.texts = self.source.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def log_calibration(self, gaps: Tensor) -> None:
        """Of the held-out set: how far confidence and accuracy lie apart, from score gaps better - worse."""
        if self.phase == "val":
            for number, total in enumerate(calibration_gaps(gaps).tolist()):
                self.meter.total(f"val/{BIN}{number}", total)
            self.meter.total(f"val/{BIN}count", gaps.numel())

    def _log(self, metrics: dict[str, float]) -> None:
        super()._log(finished(metrics))


def finished(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with what follows from sums over the whole step or evaluation, and without those sums."""
    done = {name: value for name, value in metrics.items() if SQUARE not in name and BIN not in name}
    for phase in ("train", "val"):
        if f"{phase}/{SQUARE}" in metrics:
            mean = metrics[f"{phase}/rewards/mean"]
            done[f"{phase}/rewards/std"] = math.sqrt(max(0.0, metrics[f"{phase}/{SQUARE}"] - mean**2))
    if metrics.get(f"val/{BIN}count"):
        bins = torch.tensor([metrics[f"val/{BIN}{number}"] for number in range(NUM_BINS)], dtype=torch.float64)
        done["val/calibration_error"] = float(calibration_error(bins, metrics[f"val/{BIN}count"]))
    return done


def numbers(examples: Sequence[Example], column: str, option: str, *, share: bool = False) -> list[float]:
    """A column of the rows, as numbers, from 0 to 1 for a `share`. UserError naming the row that holds none."""
    found, words = [], "a number from 0 to 1" if share else "a finite number"
    for example in examples:
        value: Any = example.columns.get(column)
        real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not real or (share and not 0 <= value <= 1):
            prompt = str(example.columns.get("prompt"))[:80]
            raise UserError(
                f"data: column '{column}' of row {example.id} ({prompt}) is {value!r}: it must be {words}: mend the "
                f"row, or type algorithm.{option}=<another column>"
            )
        found.append(float(value))
    return found
