"""Distillation from a teacher: the generalised Jensen-Shannon divergence, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_v p (log p - log q)."""
    return (logp.exp() * (logp - logq)).sum(-1)


def generalized_jsd(
    student_logits: Tensor, teacher_logits: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """GKD (2306.13649): beta KL(teacher || M) + (1 - beta) KL(student || M).

    M = (1 - beta) student + beta teacher.
    logits (..., V) -> values (...): give it any chunk of tokens, whole vocabularies of long batches do not fit twice.
    beta 0 is KL(teacher || student), forward; 1 is KL(student || teacher), reverse: both by convention, since the
    formula itself goes to 0 there; values of different beta do not compare. temperature divides both, in the loss only,
    and is not the sampling temperature (ruling D27). The teacher gets no gradient.
    Statistics (...): student_entropy, teacher_agreement (same top token).
    Raises ValueError for different vocabularies: cut both to the shared one first.
    """
    if student_logits.shape[-1] != teacher_logits.shape[-1]:
        raise ValueError(
            f"student and teacher have {student_logits.shape[-1]} and {teacher_logits.shape[-1]} logits: "
            "cut both to the vocabulary they share"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    student = _log_softmax(student_logits / temperature)
    teacher = _log_softmax(teacher_logits.detach() / temperature)
    return _divergence(student, teacher, beta), _stats(student.detach(), teacher)


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 or wider. A token forbidden by a logit of -inf gets a finite log-prob: 0 * (-inf + inf) is NaN."""
    logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return logprobs.clamp(min=torch.finfo(logprobs.dtype).min / 4)


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _stats(student: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    agree = student.argmax(-1) == teacher.argmax(-1)
    return {"student_entropy": -(student.exp() * student).sum(-1), "teacher_agreement": agree.to(student.dtype)}
