"""KL estimators: values, what their gradients are, and which way they pull."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.kl import (
    ESTIMATORS,
    KL_LOSSES,
    corrected_k3,
    estimator,
    k1,
    k2,
    k3,
    kl_loss,
    kl_stats,
    sequence_kl,
    sequence_kl_loss,
    straight_through_k3,
)
from alignment.losses.reduce import masked_mean, masked_sum


def test_kl_estimators_token(vector: Callable) -> None:
    v = vector("kl_estimators_token")
    logprobs, ref, mask = v.leaf("logps"), v["ref_logps"], v["mask"]
    for name, estimate in ESTIMATORS.items():
        values = estimate(logprobs, ref)
        v.check(name, torch.where(mask, values, 0.0))
        v.check(f"{name}_token_mean", masked_mean(values, mask))
        gradient = torch.autograd.grad(masked_mean(values, mask), logprobs)[0]
        v.check(f"grad_{name}_as_loss_token_mean", gradient)
    v.check("k1_seq_sum", sequence_kl(logprobs, ref, mask))
    v.check("k3_seq_sum", masked_sum(k3(logprobs, ref), mask, -1))
    stats = kl_stats(logprobs, ref, mask)
    assert not stats["kl"].requires_grad
    torch.testing.assert_close(stats["kl"], k3(logprobs, ref).detach())
    torch.testing.assert_close(stats["kl_seq"], sequence_kl(logprobs, ref, mask).detach())


def test_kl_estimators_exact_moments(vector: Callable) -> None:
    """Expectations over a 3-token vocabulary, enumerated."""
    v = vector("kl_estimators_exact_moments")
    p, q = v["policy"], v["ref"]
    for name, estimate in ESTIMATORS.items():
        values = estimate(p.log(), q.log())
        mean = (p * values).sum()
        v.check(f"E_{name}", mean)
        v.check(f"std_{name}", (p * (values - mean) ** 2).sum().sqrt())
    v.check("true_reverse_kl", (p * (p / q).log()).sum())
    v.check("true_forward_kl", (q * (q / p).log()).sum())


class TwoTokens:
    """All four sequences of two binary tokens under a policy with three logits: root, after 0, after 1."""

    SEQUENCES = list(itertools.product((0, 1), (0, 1)))

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta

    def logprobs(self) -> Tensor:
        """(4, 2) token log-probs of every sequence."""
        rows = []
        for first, second in self.SEQUENCES:
            at = (self.theta[0], self.theta[1 + first])
            rows.append([torch.nn.functional.logsigmoid(x if y else -x) for x, y in zip(at, (first, second))])
        return torch.stack([torch.stack(row) for row in rows])


def test_kl_gradients_exact_enumeration(vector: Callable) -> None:
    """Expected gradients, in the reward (score function) and in the loss (differentiated), over all sequences."""
    v = vector("kl_gradients_exact_enumeration")
    theta, other = v.leaf("theta"), v["theta_ref"]
    logprobs, ref = TwoTokens(theta).logprobs(), TwoTokens(other).logprobs()
    weight, mask = logprobs.detach().sum(-1).exp(), torch.ones_like(logprobs, dtype=torch.bool)
    grad = lambda loss: torch.autograd.grad(loss, theta, retain_graph=True)[0]  # noqa: E731

    exact = (logprobs.sum(-1).exp() * sequence_kl(logprobs, ref, mask)).sum()
    v.check("sequence_reverse_kl", exact)
    v.check("exact_grad_reverse_kl", grad(exact))
    forward = (ref.sum(-1).exp() * sequence_kl(ref, logprobs, mask)).sum()
    v.check("exact_grad_forward_kl", grad(forward))

    for name, estimate in ESTIMATORS.items():
        rewards = estimate(logprobs, ref).detach()
        v.check(f"E_grad_reward_{name}_full", grad((weight * rewards.sum(-1) * logprobs.sum(-1)).sum()))
        if name == "k1":
            to_go = rewards.flip(-1).cumsum(-1).flip(-1)
            v.check("E_grad_reward_k1_to_go", grad((weight[:, None] * to_go * logprobs).sum()))
            v.check("E_grad_token_reinforce_same_t_only", grad((weight[:, None] * rewards * logprobs).sum()))

    def expected(values: Tensor) -> Tensor:
        return grad((weight * values.sum(-1)).sum())

    v.check("E_grad_loss_k1", expected(k1(logprobs, ref)))
    v.check("E_grad_loss_k2_token", expected(k2(logprobs, ref)))
    v.check("E_grad_loss_k3_token", expected(k3(logprobs, ref)))
    v.check("grad_statewise_forward_kl_policy_states", expected(KL_LOSSES["k3"](logprobs, ref, None)))
    old = logprobs.detach()
    v.check("E_grad_loss_w_k3_token", expected(corrected_k3(logprobs, ref, old)))
    torch.testing.assert_close(expected(straight_through_k3(logprobs, ref, old)), expected(k2(logprobs, ref)))
    torch.testing.assert_close(expected(KL_LOSSES["k2"](logprobs, ref, None)), expected(k2(logprobs, ref)))
    v.check("E_grad_loss_k2_sequence", grad((weight * sequence_kl_loss(logprobs, ref, mask)).sum()))


@pytest.mark.parametrize(
    ("logprob", "ref", "values", "slope"),
    [
        # d = 1: k2 = 1/2, k3 = e^-1 - 1 + 1 = 0.36788, dk3/dlogp = 1 - e^-1
        (-1.0, -2.0, (1.0, 0.5, math.exp(-1)), 1 - math.exp(-1)),
        # d = -1: k3 = e - 2 = 0.71828, dk3/dlogp = 1 - e
        (-2.0, -1.0, (-1.0, 0.5, math.e - 2), 1 - math.e),
    ],
)
def test_sign_form_and_gradient(logprob: float, ref: float, values: tuple, slope: float) -> None:
    """B47: the numbers of one token, both ways round."""
    x, y = torch.tensor(logprob, dtype=torch.float64, requires_grad=True), torch.tensor(ref, dtype=torch.float64)
    assert [float(estimate(x, y).detach()) for estimate in (k1, k2, k3)] == pytest.approx(values)
    assert float(torch.autograd.grad(k3(x, y), x)[0]) == pytest.approx(slope)


@pytest.mark.parametrize("name", KL_LOSSES)
@pytest.mark.parametrize("start", [-1.0, -3.0])
def test_the_term_pulls_towards_the_reference(name: str, start: float) -> None:
    """B47: one SGD step on the KL term alone brings log p closer to the reference's -2."""
    x, ref = torch.tensor(start, requires_grad=True), torch.tensor(-2.0)
    (slope,) = torch.autograd.grad(kl_loss(name)(x, ref, None), x)
    assert abs(x - 0.1 * slope - ref) < abs(x - ref)


def test_corrected_and_straight_through_have_the_same_gradient_off_policy() -> None:
    """Both are ratio * d per token; their values are ratio * k3 and k3."""
    x = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ref, old = torch.tensor([-1.4, -0.2, -2.0]).double(), torch.tensor([-0.7, -0.9, -2.5]).double()
    slopes = [torch.autograd.grad(f(x, ref, old).sum(), x)[0] for f in (corrected_k3, straight_through_k3)]
    wanted = ((x - old).exp() * (x - ref)).detach()
    torch.testing.assert_close(slopes[0], wanted)
    torch.testing.assert_close(slopes[1], wanted)
    torch.testing.assert_close(straight_through_k3(x, ref, old), k3(x, ref))
    torch.testing.assert_close(corrected_k3(x, ref, old), (x - old).exp() * k3(x, ref))


def test_identical_models_give_exactly_zero() -> None:
    x = torch.tensor([[-1.5, -0.2]], requires_grad=True)
    for name in KL_LOSSES:
        loss = kl_loss(name)(x, x.detach(), None).sum()
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("ref", [-math.inf, -1e4])
def test_improbable_references_stay_finite(ref: float) -> None:
    x = torch.tensor([-1.0], requires_grad=True)
    for term in KL_LOSSES.values():
        for a, b in ((x, torch.tensor([ref])), (x + 1e4, torch.tensor([0.0])), (x - 1e4, torch.tensor([0.0]))):
            loss = term(a, b, None).sum()
            assert torch.isfinite(loss)
            assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


def test_the_gradient_is_there_where_the_kl_is_large() -> None:
    """A value clamp at 10 would zero it: d = -5 gives exp(5) - 6 = 142.4 and slope 1 - exp(5)."""
    x = torch.tensor(-6.0, dtype=torch.float64, requires_grad=True)
    loss = k3(x, torch.tensor(-1.0, dtype=torch.float64))
    assert float(loss.detach()) == pytest.approx(math.exp(5) - 6)
    assert float(torch.autograd.grad(loss, x)[0]) == pytest.approx(1 - math.exp(5))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="choose from k1, k2, k3"):
        estimator("k4")
    with pytest.raises(ValueError, match="expected gradient of 0"):
        kl_loss("k1")
    with pytest.raises(ValueError, match="k3_corrected"):
        kl_loss("full")


def test_gradcheck() -> None:
    x, ref, old = (torch.randn(2, 3, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    for name in ("k2", "k3", "k3_corrected"):
        assert torch.autograd.gradcheck(lambda t, name=name: kl_loss(name)(t, ref, old), x)
