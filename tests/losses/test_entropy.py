"""Entropy: its value, the bonus, the controller, the mask of uncertain tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.entropy import (
    entropy_bonus,
    entropy_from_logits,
    entropy_is_low,
    entropy_threshold,
    next_entropy_coefficient,
    top_entropy_mask,
)
from alignment.losses.grpo import clipped_policy_loss
from alignment.losses.reduce import masked_mean, masked_sum, reduce_loss


def test_entropy_bonus(vector: Callable) -> None:
    v = vector("entropy_bonus")
    entropy = entropy_from_logits(v["logits"])
    v.check("entropy", entropy)
    v.check("entropy_token_mean", masked_mean(entropy, v["mask"]))
    v.check("loss_contribution", reduce_loss(entropy_bonus(entropy, coefficient=v.params["entropy_coef"]), v["mask"]))


def test_entropy_gradient_and_extremes() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)
    far = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    assert entropy_from_logits(far).item() == 0
    assert torch.isfinite(torch.autograd.grad(entropy_from_logits(far), far)[0]).all()
    assert float(entropy_from_logits(torch.zeros(8))) == pytest.approx(math.log(8))


def test_padding_is_not_counted() -> None:
    """B61: -log p of tokens [-1, -2] sums to 3 with no padding and with four padded positions."""
    for pads in (0, 4):
        logprobs = torch.nn.functional.pad(torch.tensor([[-1.0, -2.0]]), (0, pads), value=1.0)
        mask = torch.arange(2 + pads)[None] < 2
        assert masked_sum(-logprobs, mask) == 3


def test_top_entropy_mask(vector: Callable) -> None:
    v, losses = vector("top_entropy_mask"), vector("grpo_losses", partly=True)
    entropy, mask, keep = v["entropies"], v["mask"], v.params["top_entropy_quantile"]
    v.check("threshold", entropy_threshold(entropy[mask], keep=keep))
    kept = top_entropy_mask(entropy, mask, keep=keep)
    v.inputs["mask"] = mask
    v.check("mask", kept)
    clip = {"clip_eps": 0.2, "clip_eps_high": 0.28}
    values, _ = clipped_policy_loss(losses["logps"], losses["old_logps"], losses["advantages"], mask, **clip)
    v.check("dapo_loss_masked_denominator_all_tokens", reduce_loss(values * kept, mask))
    v.check("dapo_loss_masked_denominator_kept_tokens", reduce_loss(values, kept))


def test_threshold_is_torch_quantile() -> None:
    entropy = torch.rand(17, dtype=torch.float64)
    for keep in (1.0, 0.5, 0.2, 0.01):
        torch.testing.assert_close(entropy_threshold(entropy, keep=keep), torch.quantile(entropy, 1 - keep))
    mask = torch.ones(1, 17, dtype=torch.bool)
    assert top_entropy_mask(entropy[None], mask, keep=1.0).all()
    # A threshold of all ranks replaces the batch's own.
    assert not top_entropy_mask(entropy[None], mask, keep=1.0, threshold=torch.tensor(2.0)).any()
    assert not top_entropy_mask(entropy[None], ~mask, keep=0.2).any()
    with pytest.raises(ValueError, match="keep"):
        entropy_threshold(entropy, keep=0.0)


def test_adaptive_entropy_coefficient(vector: Callable) -> None:
    v = vector("adaptive_entropy_coefficient")
    p, coefficient, found = v.params, v.params["init"], []
    for entropy in v["entropies"].tolist():
        coefficient = next_entropy_coefficient(
            coefficient, entropy, target=p["target"], step=p["delta"], minimum=p["min"], maximum=p["max"]
        )
        found.append(coefficient)
    v.check("coef_after_each_step", torch.tensor(found, dtype=torch.float64))
    assert next_entropy_coefficient(1.0, 0.0) == 1.0
    assert entropy_is_low(0.2)
    assert not entropy_is_low(0.21)
