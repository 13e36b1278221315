"""AlphaPO."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alignment.losses.alphapo import alphapo
from alignment.losses.dpo import Pairs, alpha_divergence
from alignment.losses.simpo import simpo


def averages(chosen: Tensor, rejected: Tensor) -> Pairs:
    zero, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    return Pairs(chosen, rejected, zero, zero, one, one)


def test_alphapo(vector: Callable) -> None:
    v = vector("alphapo")
    beta, alpha, ratio = v.params["beta"], v.params["alpha"], v.params["gamma"] / v.params["beta"]
    pairs = averages(v["avg_logp_chosen"], v["avg_logp_rejected"])
    v.check("transformed_chosen", alpha_divergence(pairs.chosen, alpha=alpha))
    v.check("transformed_rejected", alpha_divergence(pairs.rejected, alpha=alpha))
    values = alphapo(pairs, beta=beta, alpha=alpha, gamma_beta_ratio=ratio)
    v.check("per_pair", values)
    v.check("loss", values.mean())
    v.check("alpha_to_0_limit_is_simpo", simpo(pairs, beta=beta, gamma_beta_ratio=ratio).mean())
    v.check("alpha_to_0_limit_is_simpo", alphapo(pairs, beta=beta, alpha=0.0, gamma_beta_ratio=ratio).mean())
    torch.testing.assert_close(
        alphapo(pairs, beta=beta, alpha=alpha), alphapo(pairs, beta=beta, alpha=alpha, gamma_beta_ratio=0.04)
    )


def test_gradcheck_and_extremes() -> None:
    a, b = ((-torch.rand(4, dtype=torch.float64)).requires_grad_() for _ in range(2))
    for alpha in (0.25, -0.25):
        loss = lambda a, b, alpha=alpha: alphapo(averages(a, b), beta=2.5, alpha=alpha)  # noqa: E731
        assert torch.autograd.gradcheck(loss, (a, b))
        x = torch.tensor([-1e4], requires_grad=True)
        for pairs in (averages(x, torch.zeros(1)), averages(torch.zeros(1), x)):
            value = alphapo(pairs, beta=2.5, alpha=alpha)
            assert torch.isfinite(value).all()
            assert torch.isfinite(torch.autograd.grad(value.sum(), x)[0]).all()
