"""Policy-gradient losses of the GRPO family: one small function each, per token, not reduced.

logprobs, old_logprobs (N, C); advantages (N,) or (N, C); mask (N, C) bool. `old_logprobs` None means that the samples
are the current policy's: the ratio is then 1 in value, with its gradient. Each returns (values (N, C), statistics).
Statistics are detached, (N, C), and mean over the mask.

Weights per token (entropy mask, sampler mismatch, off-policy mask) multiply the values; the KL term is added after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.losses.kl import MAX_LOG_RATIO, log_ratio
from alignment.losses.reduce import masked_mean, masked_sum

Result = tuple[Tensor, dict[str, Tensor]]


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """log p - log p_old per token, clamped so that its exp is finite."""
    return log_ratio(logprobs, logprobs.detach() if old_logprobs is None else old_logprobs)


def per_token(advantages: Tensor) -> Tensor:
    """(N,) -> (N, 1), which broadcasts; (N, C) stays."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def either(which: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    """yes or no in the dtype of `like`; torch.where of two floats would round them to float32 first."""
    return torch.where(which, like.new_tensor(yes), like.new_tensor(no))


def clip_range(clip_eps: float, clip_eps_high: float | None) -> tuple[float, float]:
    """Bounds of the ratio. Raises ValueError where they are no range around 1."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    if not 0 <= clip_eps <= 1 or high < 0:
        raise ValueError(f"clip_eps must be in [0, 1] and clip_eps_high at least 0, got {clip_eps} and {high}")
    return 1 - clip_eps, 1 + high


def clip_stats(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float]) -> dict[str, Tensor]:
    """Whether each token's gradient is cut off: below with A < 0, above with A > 0, either. By the unmodified ratio."""
    ratio, (low, high) = ratio.detach(), bounds
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    names = {"clip_ratio/low": below, "clip_ratio/high": above, "clip_ratio/region": below | above}
    return {"ratio": ratio} | {name: hit.to(ratio.dtype) for name, hit in names.items()}


def clip_extremes(stats: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Over the sequences of a batch: least share of tokens clipped below, largest clipped above; NaN without tokens."""
    used = mask.any(-1)
    low = torch.where(used, masked_mean(stats["clip_ratio/low"], mask, -1), torch.inf)
    high = torch.where(used, masked_mean(stats["clip_ratio/high"], mask, -1), -torch.inf)
    values = {"clip_ratio/low_min": low.amin(), "clip_ratio/high_max": high.amax()}
    return {name: torch.where(used.any(), value, torch.nan) for name, value in values.items()}


def surrogate(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], delta: float | None = None) -> Tensor:
    """-min(r A, clip(r) A), with r <- min(r, delta) in the unclipped branch only (INTELLECT-2, 2505.07291).

    For A < 0 that equals PPO's dual clip at c = delta; for A > 0 it does nothing.
    """
    if delta is not None and delta <= bounds[1]:
        raise ValueError(f"delta={delta} must be above the upper clip bound {bounds[1]}, or it would clip A > 0 too")
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(unclipped * advantages, ratio.clamp(*bounds) * advantages)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    delta: float | None = None,
) -> Result:
    """The token surrogate of GRPO (2402.03300 eq. 3), DAPO (2503.14476), Dr. GRPO (2503.20783) and BNPO.

    They differ in the reduction, and DAPO in clip_eps_high = 0.28. On-policy the value is -A and the gradient is not 0.
    """
    bounds, advantages = clip_range(clip_eps, clip_eps_high), per_token(advantages)
    ratio = policy_log_ratio(logprobs, old_logprobs).exp()
    return surrogate(ratio, advantages, bounds, delta), clip_stats(ratio, advantages, bounds)


def _sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """Mean of the token log-ratios of each completion, (N, 1)."""
    return masked_mean(policy_log_ratio(logprobs, old_logprobs), mask, -1)[:, None]


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 3e-4,
    clip_eps_high: float | None = 4e-4,
    delta: float | None = None,
) -> Result:
    """GSPO (2507.18071 eqs. 5, 7): the clipped surrogate of exp(mean_t log-ratio), one ratio for a whole row."""
    bounds, advantages = clip_range(clip_eps, clip_eps_high), per_token(advantages)
    ratio = _sequence_log_ratio(logprobs, old_logprobs, mask).exp().expand_as(logprobs)
    return surrogate(ratio, advantages, bounds, delta), clip_stats(ratio, advantages, bounds)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 3e-4,
    clip_eps_high: float | None = 4e-4,
    delta: float | None = None,
) -> Result:
    """GSPO-token (2507.18071 eqs. 13, 14): sg(s) * p / sg(p). The value of `gspo`, but each token its own advantage."""
    bounds, advantages = clip_range(clip_eps, clip_eps_high), per_token(advantages)
    mean = _sequence_log_ratio(logprobs, old_logprobs, mask).detach()
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return surrogate(ratio, advantages, bounds, delta), clip_stats(ratio, advantages, bounds)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    is_weight_max: float = 5.0,
    is_weight_min: float = 0.0,
) -> Result:
    """CISPO: -sg(clip(r, is_weight_min, is_weight_max)) A log p; every token keeps a gradient.

    MiniMax-M1 (2506.13585) clips on both sides, ScaleRL (2510.13786) only above, at 5. The bounds are
    absolute weights, not distances from 1 (ruling D13). Clip statistics: weights that hit a bound.
    """
    if not 0 <= is_weight_min < is_weight_max:
        raise ValueError(f"needs 0 <= is_weight_min < is_weight_max, got {is_weight_min} and {is_weight_max}")
    advantages = per_token(advantages)
    ratio = policy_log_ratio(logprobs, old_logprobs).exp().detach()
    values = -ratio.clamp(is_weight_min, is_weight_max) * advantages * logprobs
    hits = {"clip_ratio/low": ratio < is_weight_min, "clip_ratio/high": ratio > is_weight_max}
    return values, {"ratio": ratio} | {name: hit.to(ratio.dtype) for name, hit in hits.items()}


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Result:
    """SAPO (2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip.

    Its slope at r = 1 is -A for any tau, GRPO's; its value there, -2 A / tau, is not comparable with other losses.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be above 0, got {tau_pos} and {tau_neg}")
    advantages = per_token(advantages)
    ratio = policy_log_ratio(logprobs, old_logprobs).exp()
    tau = either(advantages > 0, tau_pos, tau_neg, like=ratio)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {"ratio": ratio.detach()}


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Result:
    """VESPO (2602.10693): -sg(phi(W)) A log p, W = exp(sum_t log-ratio), phi(W) = W^k exp(lambda (1 - W)).

    phi is 1 at W = 1 and falls to 0 far from it. k and lambda by the sign of A. log W is kept in [log 1e-8, 20].
    """
    advantages = per_token(advantages)
    log_weight = masked_sum(policy_log_ratio(logprobs, old_logprobs), mask, -1)[:, None].detach()
    log_weight = log_weight.clamp(math.log(1e-8), MAX_LOG_RATIO)
    k = either(advantages >= 0, k_pos, k_neg, like=logprobs)
    rate = either(advantages >= 0, lambda_pos, lambda_neg, like=logprobs)
    gate = (rate + k * log_weight - rate * log_weight.exp()).exp()
    stats = {"ratio": log_weight.exp().expand_as(logprobs), "vespo_weight": gate.expand_as(logprobs)}
    return -gate * advantages * logprobs, stats


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 0.4,
) -> Result:
    """GMPO (2507.20673): -A exp(mean_t clip(log-ratio)), a geometric mean; clip_eps is in log space.

    One-sided: min(d, clip(d)) for A > 0, max for A < 0. One value per completion, repeated on its tokens, so that
    seq_mean_token_mean gives the mean over completions. Advantages (N,), since tokens share one value.
    """
    if advantages.dim() != 1:
        raise ValueError(f"gmpo takes one advantage per completion, got shape {tuple(advantages.shape)}")
    advantages = per_token(advantages)
    d = policy_log_ratio(logprobs, old_logprobs)
    clipped = torch.where(advantages > 0, d.clamp(max=clip_eps), d.clamp(min=-clip_eps))
    values = -advantages * masked_mean(clipped, mask, -1)[:, None].exp()
    ratio = d.detach().exp()
    return values.expand_as(d), clip_stats(ratio, advantages, (math.exp(-clip_eps), math.exp(clip_eps)))


class PolicyLoss(NamedTuple):
    """A loss and the reduction its paper uses (a name in `reduce.REDUCTIONS`)."""

    function: Callable[..., Result]
    reduction: str


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped_policy_loss, "seq_mean_token_mean"),
    "bnpo": PolicyLoss(clipped_policy_loss, "microbatch_token_mean"),
    "dapo": PolicyLoss(clipped_policy_loss, "token_mean"),
    "dr_grpo": PolicyLoss(clipped_policy_loss, "constant"),
    "gspo": PolicyLoss(gspo, "seq_mean_token_mean"),
    "gspo_token": PolicyLoss(gspo_token, "seq_mean_token_mean"),
    "luspo": PolicyLoss(gspo, "row_mean_token_sum"),
    "cispo": PolicyLoss(cispo, "token_mean"),
    "sapo": PolicyLoss(sapo, "seq_mean_token_mean"),
    "vespo": PolicyLoss(vespo, "token_mean"),
    "gmpo": PolicyLoss(gmpo, "seq_mean_token_mean"),
}
FUNCTIONS: dict[str, Callable[..., Result]] = {name: loss.function for name, loss in POLICY_LOSSES.items()}
