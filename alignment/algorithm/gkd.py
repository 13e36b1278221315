"""Generalised knowledge distillation: learn a teacher's distributions, also on the student's own samples."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor

from alignment.algorithm.base import OfflineModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.distill import generalized_jsd
from alignment.model.compare import compare_tokens
from alignment.model.hf import named
from alignment.ref_strategy.frozen import Frozen


class GKD(OfflineModule):
    """GKD (2306.13649): the generalised Jensen-Shannon divergence to a teacher, as a mean over the step's tokens.

    teacher: a second source of a model, with the student's tokenizer. lmbda: share of optimizer steps whose completions
    the student samples (`callbacks/student_samples.py`); the others take the demonstrations. temperature divides both
    models' logits in the loss, not in sampling. No gradient passes through the sampling.
    """

    data_form: ClassVar[str] = "demonstrations"
    # At every optimizer step anew: an adapter would go to a server as often.
    samples_in_process: ClassVar[bool] = True

    def __init__(
        self, *passed: Any, teacher: Any, beta: float, temperature: float, lmbda: float, **common: Any
    ) -> None:
        super().__init__(*passed, **common)
        self.teacher_source, self.on_policy_share = teacher, lmbda
        self.divergence = functools.partial(generalized_jsd, beta=beta, temperature=temperature)
        self.teacher = Frozen()
        with named("algorithm.teacher"):
            teacher.check()
            theirs = teacher.tokenizer.get_vocab()
        check_same_tokens(self.source.tokenizer.get_vocab(), theirs)

    def configure_model(self) -> None:
        if self.policy is None:
            super().configure_model()
            assert self.policy is not None
            self.teacher_source.compact_for(self.trainer.precision)
            self.teacher.attach(self.teacher_source, self.policy)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        values, stats = self._compare(batch)
        loss = self.token_mean(values, batch)
        self.log_loss(loss, batch, batch.step_tokens)
        self.log_stats(stats | {"divergence": values}, batch.loss_mask)
        if self.trainer.training:
            self.meter.add("train/on_policy", float(batch.sampler_logprobs is not None), 1.0)
        return loss

    def _compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.policy is not None
        with self.trainer.precision_plugin.forward_context(), self.teacher.scoring_model(self.policy) as teacher:
            return compare_tokens(
                self.policy,
                teacher,
                batch,
                self.divergence,
                paths=(self.source.shared_prompt, self.teacher_source.shared_prompt),
                chunk_tokens=self.source.head_chunk_tokens,
            )


def check_same_tokens(student: dict[str, int], teacher: dict[str, int]) -> None:
    """Raise UserError unless every id of the student's vocabulary (token -> id) is the same token for the teacher."""
    theirs = {number: token for token, number in teacher.items()}
    different = sorted((number, token) for token, number in student.items() if theirs.get(number) != token)
    if different:
        number, token = different[0]
        raise UserError(
            f"algorithm.teacher: {len(different)} of the student's {len(student)} tokens are others for the teacher "
            f"(id {number} is {token!r} for the student, {theirs.get(number)!r} for the teacher), so the distributions "
            "cannot be compared: type algorithm.teacher.path=<a model with the student's tokenizer>"
        )
