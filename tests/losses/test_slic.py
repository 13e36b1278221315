"""SLiC's margin loss: values by hand, gradients, what changes nothing, and that it is CPO's hinge in other units."""

from __future__ import annotations

import pytest
import torch

from alignment.losses.cpo import CPO_LOSSES
from alignment.losses.dpo import Pairs, pairs_from_tokens
from alignment.losses.slic import slic


def pairs(chosen: torch.Tensor, rejected: torch.Tensor) -> Pairs:
    zero = torch.zeros_like(chosen)
    return Pairs(chosen, rejected, zero, zero, zero + 3, zero + 5)


def test_values_by_hand() -> None:
    """margin 1: ahead by 3 -> 0; ahead by 0.25 -> 0.75; equal -> 1; behind by 2 -> 3."""
    values = slic(pairs(torch.tensor([-2.0, -1.0, -4.0, -6.0]), torch.tensor([-5.0, -1.25, -4.0, -4.0])), margin=1.0)
    assert values.tolist() == [0.0, 0.75, 1.0, 3.0]


def test_it_is_the_hinge_of_cpo_times_the_margin() -> None:
    """max(0, d - m) = d max(0, 1 - m / d)."""
    given = pairs(torch.randn(20), torch.randn(20))
    torch.testing.assert_close(slic(given, margin=2.5), 2.5 * CPO_LOSSES["hinge"](given, beta=1 / 2.5))


def test_gradients() -> None:
    chosen, rejected = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda c, r: slic(pairs(c, r), margin=0.7), (chosen, rejected))
    slic(pairs(chosen, rejected), margin=0.7).sum().backward()
    inside = (chosen - rejected).detach() < 0.7
    torch.testing.assert_close(chosen.grad, -inside.double())
    torch.testing.assert_close(rejected.grad, inside.double())


def test_padding_order_and_a_constant_change_nothing() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    logprobs = torch.where(mask, -torch.rand(4, 3), 0.0)
    values = slic(pairs_from_tokens(logprobs, None, mask), margin=1.0)
    wide = [torch.nn.functional.pad(x, (0, 4)) for x in (logprobs, mask)]
    wide[0][:, 3:] = float("nan")
    torch.testing.assert_close(slic(pairs_from_tokens(wide[0], None, wide[1]), margin=1.0), values)
    turned = slic(pairs_from_tokens(logprobs[[2, 3, 0, 1]], None, mask[[2, 3, 0, 1]]), margin=1.0)
    torch.testing.assert_close(turned, values[[1, 0]])
    chosen, rejected = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(
        slic(pairs(chosen + 3, rejected + 3), margin=1.0),
        slic(pairs(chosen, rejected), margin=1.0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_far_answers_stay_finite_and_a_margin_of_nothing_is_refused() -> None:
    values = slic(pairs(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4])), margin=1.0)
    assert values.tolist() == [10001.0, 0.0]
    with pytest.raises(ValueError, match="above 0"):
        slic(pairs(torch.zeros(1), torch.zeros(1)), margin=0.0)
