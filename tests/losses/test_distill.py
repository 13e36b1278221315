"""Generalised Jensen-Shannon divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.distill import generalized_jsd
from alignment.losses.reduce import masked_mean


def test_gkd_generalized_jsd(vector: Callable) -> None:
    v = vector("gkd_generalized_jsd")
    student, teacher, mask = v["student_logits"], v["teacher_logits"], v["labels"] != -100
    for beta in v.params["betas"]:
        values, _ = generalized_jsd(student, teacher, beta=beta)
        v.check(f"per_token_T1/{beta}", values)
        v.check(f"loss_masked_T1/{beta}", masked_mean(values, mask))
        if str(beta) in v.expected["per_token_T0p9"]:
            v.check(f"per_token_T0p9/{beta}", generalized_jsd(student, teacher, beta=beta, temperature=0.9)[0])
    small, _ = generalized_jsd(student, teacher, beta=1e-6)
    # A difference of nearly equal numbers divided by 1e-6: nine digits are lost in float64.
    wanted = v.expected["jsd_small_beta_over_beta_tends_to_forward_kl"]
    assert masked_mean(small, mask).item() / 1e-6 == pytest.approx(wanted, rel=1e-6)
    v.leave("jsd_small_beta_over_beta_tends_to_forward_kl")
    far = torch.tensor([[[1e4, 0.0]]], dtype=torch.float64)
    v.check("upper_bound_beta_0p5", generalized_jsd(far, -far)[0][0, 0])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_it_is_the_sum_over_the_vocabulary(beta: float) -> None:
    """Against torch's kl_div with the mixture of probabilities; the ends by their convention."""
    student, teacher = (torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    p, q = student.softmax(-1), teacher.softmax(-1)
    mixed = (1 - beta) * p + beta * q
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    wanted = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, mixed) + (1 - beta) * kl(p, mixed))
    torch.testing.assert_close(generalized_jsd(student, teacher, beta=beta)[0], wanted)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_properties(beta: float) -> None:
    """gradcheck, zero for equal models, chunks, shift of logits, extremes, no gradient for the teacher."""
    student, teacher = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = lambda s: generalized_jsd(s, teacher, beta=beta, temperature=0.7)[0]  # noqa: E731
    assert torch.autograd.gradcheck(loss, student)
    assert torch.autograd.grad(loss(student).sum(), teacher, allow_unused=True) == (None,)
    same, stats = generalized_jsd(student, student.detach(), beta=beta)
    torch.testing.assert_close(same, torch.zeros(5).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(same.sum(), student)[0], torch.zeros(5, 4).double(), rtol=0, atol=1e-12
    )
    assert (stats["teacher_agreement"] == 1).all()
    chunks = [generalized_jsd(student[r], teacher[r], beta=beta, temperature=0.7)[0] for r in (slice(2), slice(2, 5))]
    torch.testing.assert_close(torch.cat(chunks), loss(student))
    torch.testing.assert_close(generalized_jsd(student + 3, teacher - 5, beta=beta, temperature=0.7)[0], loss(student))
    far = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    value, stats = generalized_jsd(far, -far.detach(), beta=beta)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), far)[0]).all()
    assert stats["teacher_agreement"].item() == 0
    assert stats["student_entropy"].item() == 0


def test_a_forbidden_token_adds_nothing() -> None:
    """Logits of -inf on both sides, as for tokens masked out of a vocabulary."""
    student = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -math.inf]])
    for beta in (0.0, 0.5, 1.0):
        results = [generalized_jsd(s, t, beta=beta) for s, t in ((student, teacher), (student[:, :2], teacher[:, :2]))]
        torch.testing.assert_close(results[0], results[1])
        slopes = [torch.autograd.grad(values.sum(), student)[0] for values, _ in results]
        torch.testing.assert_close(slopes[0], slopes[1])


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="4 and 5 logits"):
        generalized_jsd(torch.zeros(1, 4), torch.zeros(1, 5))
    with pytest.raises(ValueError, match="beta"):
        generalized_jsd(torch.zeros(1, 4), torch.zeros(1, 4), beta=1.5)
