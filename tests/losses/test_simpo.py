"""SimPO."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.dpo import Pairs, pair_stats, pairs_from_tokens
from alignment.losses.options import choose
from alignment.losses.simpo import simpo


def averages(chosen: Tensor, rejected: Tensor) -> Pairs:
    """Pairs of one token each, so that averages are the log-probs themselves."""
    zero, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    return Pairs(chosen, rejected, zero, zero, one, one)


def test_simpo(vector: Callable) -> None:
    v = vector("simpo")
    p = v.params
    pairs = averages(v.leaf("avg_logp_chosen"), v["avg_logp_rejected"])
    assert p["gamma"] == p["beta"] * p["gamma_beta_ratio"]
    values = simpo(pairs, beta=p["beta"], gamma_beta_ratio=p["gamma_beta_ratio"])
    v.check("per_pair", values)
    v.check("loss", values.mean())
    v.check_grad("grad_avg_chosen", values.mean(), pairs.chosen)
    stats = pair_stats(pairs, beta=p["beta"], per_token=True)
    v.check("rewards_chosen", stats["rewards/chosen"].mean())
    v.check("rewards_accuracies", stats["rewards/accuracies"].mean())


def test_the_margin_is_scaled_by_beta_and_nothing_is_added() -> None:
    """B56: means -1.0 and -1.5, beta 2: gamma 1 -> -log sigmoid(1 - 1) = log 2; gamma 0.5 -> log(1 + e^-0.5)."""
    pairs = averages(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert simpo(pairs, beta=2.0, gamma_beta_ratio=0.5).item() == pytest.approx(math.log(2))
    assert simpo(pairs, beta=2.0, gamma_beta_ratio=0.25).item() == pytest.approx(
        math.log(1 + math.exp(-0.5))
    )  # 0.474077


def test_from_tokens_it_uses_averages() -> None:
    """Chosen -1, -3 (mean -2) and rejected -1 (mean -1): z = 2 (-2 + 1 - 0.5) = -3; padding is left out."""
    logprobs = torch.tensor([[-1.0, -3.0], [-1.0, float("nan")]])
    pairs = pairs_from_tokens(logprobs, None, ~logprobs.isnan())
    assert simpo(pairs, beta=2.0).item() == pytest.approx(math.log(1 + math.exp(3)))


def test_gradcheck_extremes_and_options() -> None:
    a, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = lambda a, b: simpo(averages(a, b), beta=2.0, label_smoothing=0.1)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (a, b))
    for gap in (1e4, -1e4):
        x = torch.tensor([gap], requires_grad=True)
        for pairs in (averages(x, torch.zeros(1)), averages(torch.zeros(1), x)):
            value = simpo(pairs, beta=2.5)
            assert torch.isfinite(value).all()
            assert torch.isfinite(torch.autograd.grad(value.sum(), x)[0]).all()
    with pytest.raises(ValueError, match="simpo cannot use tau"):
        choose({"simpo": simpo}, "simpo", beta=2.0, tau=1.0)
    with pytest.raises(ValueError, match="label_smoothing"):
        simpo(averages(a, b), beta=2.0, label_smoothing=0.7)
