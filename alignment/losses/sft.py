"""Likelihood of demonstrations: negative log-likelihood, DFT, label smoothing, and the noise of NEFTune."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def nll(logprobs: Tensor) -> Tensor:
    """-log p per token, (N, C). token_mean of it is usual; seq_mean_token_mean weighs every example the same."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Dynamic Fine-Tuning (2508.05629): -sg(p) log p per token.

    The gradient with respect to logits is damped by p: improbable targets pull less. Learns nothing from a model for
    which every target is improbable.
    """
    return -logprobs.detach().exp() * logprobs


def label_smoothed_nll(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """(1 - e) * -log p(label) + e * mean over the vocabulary of -log p.

    logits (..., V), labels (...) int64 that index it (put any valid id where masked). Returns (...), in float32 or the
    logits' wider type. Raises ValueError for a smoothing outside [0, 1).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = logits.log_softmax(-1)
    target = logprobs.gather(-1, labels[..., None]).squeeze(-1)
    return smoothed_nll(target, logprobs.mean(-1), label_smoothing=label_smoothing)


def smoothed_nll(logprobs: Tensor, vocab_mean: Tensor, *, label_smoothing: float) -> Tensor:
    """The same from what a chunked head gives: log p(label) and the mean of log p over the vocabulary, both (...)."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    return -(1 - label_smoothing) * logprobs - label_smoothing * vocab_mean


def perplexity(mean_nll: float | Tensor) -> float | Tensor:
    """exp of the token mean over the whole set; never a mean of exps."""
    return mean_nll.exp() if isinstance(mean_nll, Tensor) else math.exp(mean_nll)


def neftune_bound(lengths: Tensor, dim: int, *, alpha: float) -> Tensor:
    """alpha / sqrt(L d): half the width of NEFTune's uniform noise (2310.05914) for rows of `lengths` tokens."""
    return alpha / (lengths.clamp(min=1) * dim).sqrt()


def neftune_noise(mask: Tensor, dim: int, *, alpha: float, generator: torch.Generator | None = None) -> Tensor:
    """Noise to add to embeddings in training, (N, L, dim) float32, 0 outside `mask` (N, L).

    Departs from the usual code: L is the row's own length, not the padded width, so that padding changes nothing.
    """
    bound = neftune_bound(mask.sum(-1).float(), dim, alpha=alpha)[:, None, None]
    noise = torch.rand(*mask.shape, dim, generator=generator, device=mask.device) * 2 - 1
    return torch.where(mask[..., None], noise * bound, 0.0)
