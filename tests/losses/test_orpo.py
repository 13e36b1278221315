"""ORPO: log-odds that stay finite, and which tokens the likelihood term covers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.dpo import Pairs
from alignment.losses.orpo import log1mexp, log_odds, orpo
from alignment.losses.reduce import reduce_loss
from alignment.losses.sft import nll


def averages(chosen: Tensor, rejected: Tensor) -> Pairs:
    zero, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    return Pairs(chosen, rejected, zero, zero, one, one)


def test_orpo(vector: Callable) -> None:
    v = vector("orpo")
    pairs = averages(v.leaf("avg_logp_chosen"), v["avg_logp_rejected"])
    values, stats = orpo(pairs, beta=v.params["lambda"])
    v.check("or_loss", values.mean())
    v.check("loss", v["nll_loss"] + values.mean())
    v.check_grad("grad_avg_chosen_or_term", values.mean(), pairs.chosen)
    v.check("log_odds_chosen_per_pair", stats["log_odds_chosen"])
    v.check("log_odds_chosen", stats["log_odds_chosen"].mean())
    v.check("log_odds_ratio", stats["log_odds_ratio"].mean())
    v.check("near_certain_avg_logp_minus_1e-9_log1mexp", log1mexp(torch.tensor(-1e-9, dtype=torch.float64)))


def test_the_odds_by_hand() -> None:
    """B55: means -0.5 and -1.0: log-odds difference 0.97408, -log sigmoid of it 0.32030."""
    values, stats = orpo(averages(torch.tensor([-0.5]), torch.tensor([-1.0])), beta=1.0)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-0.5, -1.0)]
    assert stats["log_odds_chosen"].item() == pytest.approx(math.log(odds[0] / odds[1]))
    assert stats["log_odds_chosen"].item() == pytest.approx(0.97408, abs=1e-5)
    assert values.item() == pytest.approx(0.32030, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certainty_and_extremes_are_finite(dtype: torch.dtype) -> None:
    """B55: probability 1 has infinite odds: the loss and its gradient stay finite."""
    for a, b in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e4, -1.0), (-1.0, -1e4), (1e4, -1e4)):
        sides = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in (a, b)]
        values, _ = orpo(averages(*sides), beta=0.1)
        assert torch.isfinite(values).all()
        assert all(torch.isfinite(slope).all() for slope in torch.autograd.grad(values.sum(), sides))


def test_log_odds_in_float32_keep_their_digits() -> None:
    """Against float64 of log(p / (1 - p)), from a probability of almost 1 to almost 0."""
    x = torch.tensor([-1e-5, -1e-3, -0.1, -0.69, -0.7, -5.0, -30.0])
    wanted = x.double() - torch.log(-torch.expm1(x.double()))
    torch.testing.assert_close(log_odds(x).double(), wanted, rtol=1e-5, atol=0)


def test_gradcheck() -> None:
    a, b = ((-torch.rand(6, dtype=torch.float64) * 3).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: orpo(averages(a, b), beta=0.1)[0], (a, b))


def test_the_likelihood_covers_the_tokens_of_its_mask() -> None:
    """B55: prompt targets 3 x NLL 1, completion 2 x NLL 2: 7 / 5 = 1.4 over all, 2.0 over the completion."""
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -2.0, -2.0]])
    everything = torch.ones_like(logprobs, dtype=torch.bool)
    completion = torch.tensor([[False, False, False, True, True]])
    assert reduce_loss(nll(logprobs), everything).item() == pytest.approx(1.4)
    assert reduce_loss(nll(logprobs), completion) == 2
