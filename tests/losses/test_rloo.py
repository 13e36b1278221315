"""Losses of whole completions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.rloo import reinforce, reinforce_tokens, sequence_clipped_loss, sequence_clipped_tokens


def test_rloo_sequence_clipped_loss(vector: Callable) -> None:
    v = vector("rloo_sequence_clipped_loss")
    logprobs, old, advantages = v.leaf("seq_logps"), v["old_seq_logps"], v["advantages"]
    clip = {"clip_eps": v.params["epsilon_low"], "clip_eps_high": v.params["epsilon_high"]}
    values, stats = sequence_clipped_loss(logprobs, old, advantages, **clip)
    v.check("ratio", stats["ratio"])
    v.check("loss", values.mean())
    v.check_grad("grad_seq_logps", values.mean(), logprobs)
    v.check("reinforce_loss", reinforce(logprobs, advantages).mean())
    assert stats["clip_ratio/high"].tolist() == [0, 0, 1, 0]
    assert stats["clip_ratio/low"].tolist() == [0, 0, 0, 1]


def test_properties() -> None:
    """gradcheck; on-policy both have the same gradient; extremes."""
    logprobs, advantages = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)
    old = logprobs.detach() + 0.3 * torch.randn(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: sequence_clipped_loss(x, old, advantages)[0], logprobs)
    slopes = [
        torch.autograd.grad(loss.sum(), logprobs)[0]
        for loss in (sequence_clipped_loss(logprobs, None, advantages)[0], reinforce(logprobs, advantages))
    ]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(slopes[0], -advantages)
    far = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    values, _ = sequence_clipped_loss(far, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), far)[0]).all()


def test_token_forms_hold_the_completions_values() -> None:
    """Averaged as their reductions do they are the losses of whole completions; an unused token has no say."""
    logprobs, old = (
        torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -1.5, -0.1]]),
        torch.tensor([[-1.1, -1.8, 5.0], [-0.6, -1.0, -0.4]]),
    )
    mask, a = torch.tensor([[True, True, False], [True, True, True]]), torch.tensor([1.0, -2.0])
    values, stats = sequence_clipped_tokens(logprobs, old, a, mask, clip_eps=0.1)
    # log-ratios -0.1 and -0.1: r = exp(-0.1) = 0.904837, inside [0.9, 1.1]
    torch.testing.assert_close(values, torch.tensor([[-0.904837] * 3, [1.809675] * 3]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats["ratio"], torch.full((2, 3), 0.904837), rtol=1e-5, atol=1e-6)
    plain, _ = reinforce_tokens(logprobs, None, a, mask)
    assert torch.where(mask, plain, 0.0).sum(-1).tolist() == pytest.approx([3.0, -4.2])  # -A times -3 and -2.1


def test_the_sequence_loss_of_tokens_takes_no_advantages_per_token() -> None:
    with pytest.raises(ValueError, match="one advantage per completion"):
        sequence_clipped_tokens(torch.zeros(2, 3), None, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
