"""Samples from a policy that is not quite the trained one: another engine, other kernels, an older version.

rho = p_trainer_old / p_sampler, of old log-probs by the trainer's own pass and log-probs the sampler reported. If the
loss's old log-probs are the sampler's, its ratio already holds rho: do not multiply again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alignment.losses.kl import MAX_LOG_RATIO
from alignment.losses.options import choose
from alignment.losses.reduce import masked_mean


def sampler_gap(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log rho per token (N, C), 0 outside the mask and where the sampler's log-prob is NaN. Detached."""
    gap = (old_logprobs - sampler_logprobs).detach()
    return torch.where(mask & ~gap.isnan(), gap, 0.0)


def token_ratio(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho per token (N, C), 1 outside the mask."""
    return sampler_gap(old_logprobs, sampler_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho of whole completions (N, 1): exp of the sum, which for a long answer is far from 1."""
    return sampler_gap(old_logprobs, sampler_logprobs, mask).sum(-1, True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def _mask(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _correction(level: Callable[..., Tensor], bound: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, dict]]:
    def weights(
        old_logprobs: Tensor,
        sampler_logprobs: Tensor,
        mask: Tensor,
        *,
        is_weight_max: float,
        is_weight_min: float = 0.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = level(old_logprobs, sampler_logprobs, mask)
        kept = (ratio >= is_weight_min) & (ratio <= is_weight_max)
        stats = {"sampler_ratio": ratio, "sampler_kept": kept.to(ratio.dtype)}
        stats["sampler_gap"] = sampler_gap(old_logprobs, sampler_logprobs, mask).abs()
        return bound(ratio, is_weight_min, is_weight_max), {k: v.expand_as(mask) for k, v in stats.items()}

    return weights


# truncate: clamp rho (TIS). mask: 0 outside the bounds (MIS, IcePop).
CORRECTIONS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "token_truncate": _correction(token_ratio, _truncate),
    "token_mask": _correction(token_ratio, _mask),
    "sequence_truncate": _correction(sequence_ratio, _truncate),
    "sequence_mask": _correction(sequence_ratio, _mask),
}


def mismatch_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str,
    is_weight_max: float,
    is_weight_min: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights to multiply a policy loss by, (N, C) for token modes, (N, 1) for sequence modes. Detached.

    mode: a key of `CORRECTIONS`. TRL's default is sequence_mask with a maximum of 3; verl's token_truncate with 2.
    Statistics (N, C): sampler_ratio, sampler_kept (inside the bounds), sampler_gap = |old - sampler|.
    """
    if not 0 <= is_weight_min < is_weight_max:
        raise ValueError(f"needs 0 <= is_weight_min < is_weight_max, got {is_weight_min} and {is_weight_max}")
    correct = choose(CORRECTIONS, mode, is_weight_max=is_weight_max)
    return correct(old_logprobs, sampler_logprobs, mask, is_weight_min=is_weight_min)


def on_policy_keep(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """DeepSeek-V3.2's off-policy mask (2512.02556): (N,) bool, False to drop a completion from the policy loss.

    Kept: A >= 0, or mean_t(sampler - current) <= threshold (in nats; about 0.5). Multiply the loss by it.
    """
    drift = masked_mean(-sampler_gap(logprobs, sampler_logprobs, mask), mask, -1)
    return (advantages >= 0) | (drift <= threshold)
