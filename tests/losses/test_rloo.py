"""Losses of whole completions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from alignment.losses.rloo import reinforce, sequence_clipped_loss


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
