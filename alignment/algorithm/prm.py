"""Process reward models: is each step of a solution right."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.scoring import ScoringModule
from alignment.batch import Batch
from alignment.losses.prm import IGNORE, f1, f1_counts, solution_score, step_cross_entropy, step_stats
from alignment.model.scorer import completion_token_logits

COUNTS = "f1_counts/"


class PRM(ScoringModule):
    """Two classes, bad and good, at the last token of each step's separator ("Let's Verify Step by Step", 2305.20050).

    The loss is the mean over the labelled steps of the optimizer step. solution_score: how the steps' P(good) make the
    score of a solution in samples.jsonl; Math-Shepherd (2312.08935) takes the minimum.
    """

    data_form: ClassVar[str] = "stepwise"
    num_labels: ClassVar[int] = 2
    per_token: ClassVar[bool] = True

    def __init__(
        self,
        *passed: Any,
        solution_score: Literal["min", "prod", "last", "mean"],
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.solution_score = solution_score

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.policy is not None, "configure_model() comes first"
        with self.trainer.precision_plugin.forward_context():
            logits = completion_token_logits(self.policy, batch, path=self.source.shared_prompt)
        labels = step_labels(batch)
        values, mask = step_cross_entropy(logits, labels)
        loss = self.token_mean(values, batch)
        self.log_loss(loss, batch, batch.step_tokens)
        good = logits.detach().softmax(-1)[..., 1]
        batch.rewards = solution_score(good, mask, self.solution_score)
        self.log_stats(step_stats(good, labels))
        self.log_stats({"prob_good": good}, mask)
        for name, counts in f1_counts(good, labels).items():
            for kind, count in zip(("hits", "predicted", "actual"), counts.tolist(), strict=True):
                self.meter.total(f"{self.phase}/{COUNTS}{name}/{kind}", count)
        return loss

    def _log(self, metrics: dict[str, float]) -> None:
        super()._log(with_f1(metrics))


def step_labels(batch: Batch) -> Tensor:
    """(N, C) int64: each row's labels (1 good, 0 bad) in order, at the tokens that the loss counts; -100 elsewhere."""
    labels = torch.full_like(batch.completion_ids, IGNORE)
    said = [int(label) for example in batch.examples for label in example.columns["labels"]]
    return labels.masked_scatter(batch.loss_mask, torch.tensor(said, device=labels.device))


def with_f1(metrics: dict[str, float]) -> dict[str, float]:
    """F1 of each class over the whole step or evaluation, in the place of its counts; absent where it is undefined."""
    done = {name: value for name, value in metrics.items() if COUNTS not in name}
    for name in metrics:
        if COUNTS in name and name.endswith("/hits"):
            where, stem = name.removesuffix("/hits"), name.split("/")
            counts = torch.tensor([metrics[f"{where}/{kind}"] for kind in ("hits", "predicted", "actual")])
            value = float(f1(counts))
            done |= {f"{stem[0]}/f1_{stem[-2]}": value} if value == value else {}
    return done
