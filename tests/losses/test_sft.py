"""Likelihood losses: reductions, DFT, label smoothing, NEFTune's noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.reduce import masked_mean, reduce_loss
from alignment.losses.sft import dft, label_smoothed_nll, neftune_bound, neftune_noise, nll, perplexity


def test_sft_losses(vector: Callable) -> None:
    v = vector("sft_losses")
    logprobs, mask = v.leaf("logps"), v["mask"]
    values, limit = nll(logprobs), v.params["max_len_constant"]
    mean = reduce_loss(values, mask, "token_mean")
    v.check("token_mean", mean)
    v.check("example_mean_nonempty", reduce_loss(values, mask, "seq_mean_token_mean"))
    v.check("example_mean_all_rows", masked_mean(values, mask, -1).mean())
    v.check("seq_sum_mean_nonempty", reduce_loss(values, mask, "seq_mean_token_sum"))
    v.check("constant_norm", reduce_loss(values, mask, "constant", max_tokens=limit))
    v.check("perplexity", perplexity(mean))
    v.check("perplexity", perplexity(float(mean.detach())))
    v.check_grad("grad_logps_token_mean", mean, logprobs)
    tuned = reduce_loss(dft(logprobs), mask)
    v.check("dft_token_mean", tuned)
    v.check_grad("grad_logps_dft", tuned, logprobs)


def test_sft_all_masked(vector: Callable) -> None:
    v = vector("sft_all_masked")
    for key, name in (("token_mean", "token_mean"), ("example_mean_nonempty", "seq_mean_token_mean")):
        v.check(key, reduce_loss(nll(v["logps"]), v["mask"], name))


def test_sft_label_smoothing(vector: Callable) -> None:
    v = vector("sft_label_smoothing")
    values = label_smoothed_nll(v["logits"], v["labels"].long(), label_smoothing=v.params["epsilon"])
    v.check("per_token", values)
    v.check("token_mean", values.mean())


def test_label_smoothing_is_torch_cross_entropy() -> None:
    """torch's smoothing spreads e over the vocabulary in the same way; its gradient too."""
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3, 1])
    wanted = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="none")
    values = label_smoothed_nll(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(values, wanted)
    weights = torch.randn(5, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), logits)[0] for x in (values, wanted))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="label_smoothing"):
        label_smoothed_nll(logits, labels, label_smoothing=1.0)


def test_low_precision_logits_are_upcast() -> None:
    """B20: bfloat16 logits of a wide vocabulary, summed in float32: within 1e-4 of float64 on the same logits."""
    logits = torch.randn(2, 32_000).bfloat16()
    labels = torch.tensor([5, 7])
    wanted = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    values = label_smoothed_nll(logits, labels, label_smoothing=0.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), wanted, rtol=0, atol=1e-4)


def test_dft_gradient_on_logits_is_damped_by_the_probability() -> None:
    """d(-sg(p) log p)/dz_y = -p (1 - p) for the target: with p = 0.1 that is -0.09."""
    logits = torch.tensor([[0.0, math.log(9.0)]], dtype=torch.float64, requires_grad=True)  # p = (0.1, 0.9)
    dft(logits.log_softmax(-1)[:, 0]).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.09, 0.09])


def test_extreme_logprobs_are_finite() -> None:
    x = torch.tensor([-1e4, 0.0], requires_grad=True)
    for loss in (nll(x), dft(x)):
        assert torch.isfinite(loss).all()
        assert torch.isfinite(torch.autograd.grad(loss.sum(), x)[0]).all()


def test_gradcheck() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(nll, x)
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 3])
    assert torch.autograd.gradcheck(lambda z: label_smoothed_nll(z, labels, label_smoothing=0.1), logits)


def test_neftune_magnitude(vector: Callable) -> None:
    v = vector("neftune_magnitude")
    alpha, cases = v.params["alpha"], v["cases"]
    lengths = torch.tensor([case["seq_len"] for case in cases], dtype=torch.float64)
    bounds = torch.stack([neftune_bound(n, c["dim"], alpha=alpha) for n, c in zip(lengths, cases)])
    v.check("bound", bounds)
    v.check("noise_std", bounds / math.sqrt(3))  # of a uniform on (-bound, bound)
    sizes = torch.tensor([c["seq_len"] * c["dim"] for c in cases], dtype=torch.float64)
    v.check("expected_l2_norm_whole_sequence", bounds / math.sqrt(3) * sizes.sqrt())


def test_neftune_noise_is_bounded_and_ignores_padding() -> None:
    mask = torch.tensor([[True] * 8, [False] * 6 + [True] * 2])
    noise = neftune_noise(mask, 512, alpha=5.0, generator=torch.Generator().manual_seed(1))
    assert not noise[1, :6].any()
    for row, length in ((0, 8), (1, 2)):
        bound = 5 / math.sqrt(length * 512)
        kept = noise[row][mask[row]]
        assert float(kept.abs().max()) <= bound
        # 1,024 numbers or more: the sample std is within 10 % of bound / sqrt(3)
        assert float(kept.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert float(kept.mean()) == pytest.approx(0, abs=bound * 0.1)
