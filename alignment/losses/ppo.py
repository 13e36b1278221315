"""PPO: advantages from a critic, the two clipped losses, what to report, the weight of the KL.

Everything is (N, C) with mask (N, C) bool, unless said otherwise. Token rewards are in `token_rewards.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.losses.grpo import clip_range, per_token, policy_log_ratio, surrogate
from alignment.losses.reduce import Moments, moments


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438 eq. 16) -> (advantages, returns), detached, 0 outside the mask.

    values[:, t] is V before token t is emitted. Only masked positions are time steps: a hole (tool output) hands the
    next value and the trace on (ruling D4), so the result is that of the sequence without it. Returns = A + V, before
    whitening. bootstrap (N,): V after the last token, for rows that were cut off; default 0, the end.
    """
    rewards, values = rewards.detach(), values.detach()
    advantages, trace = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(trace) if bootstrap is None else bootstrap.detach()
    for t in range(rewards.shape[1] - 1, -1, -1):
        on = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        trace = torch.where(on, delta + gamma * lam * trace, trace)
        next_value = torch.where(on, values[:, t], next_value)
        advantages[:, t] = torch.where(on, trace, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r)), per token (1707.06347 eq. 7); reduce by token_mean.

    dual_clip c > 1 (1912.09729): for A < 0 at most -A c, without gradient beyond: bounds the loss of a bad token that
    became c times likelier. verl has it on, at 3; off here, as in the paper.
    Statistics (N, C): ratio, clip_fraction, clip_fraction_dual, approx_kl_k1 .. k3 of old || new.
    """
    bounds, advantages = clip_range(clip_eps, clip_eps_high), per_token(advantages)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds the ratio of bad tokens from above, so it must be above 1, got {dual_clip}")
    d = policy_log_ratio(logprobs, old_logprobs)
    ratio = d.exp()
    values = surrogate(ratio, advantages, bounds)
    stats = approximate_kl(d) | {"ratio": ratio.detach()}
    stats["clip_fraction"] = (values > -advantages * ratio).detach().to(d.dtype)
    if dual_clip is not None:
        limit = -advantages * dual_clip
        stats["clip_fraction_dual"] = ((values > limit) & (advantages < 0)).to(d.dtype)
        values = torch.where(advantages < 0, torch.minimum(values, limit), values)
    return values, stats


def approximate_kl(log_ratio: Tensor) -> dict[str, Tensor]:
    """KL(old || new) per token from log p_new - log p_old of the old policy's samples. k3 is >= 0 and unbiased."""
    d = log_ratio.detach()
    return {"approx_kl_k1": -d, "approx_kl_k2": 0.5 * d**2, "approx_kl_k3": torch.expm1(d) - d}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_eps: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((v - R)^2, (clip(v, v_old +- clip_eps) - R)^2), per token; reduce by token_mean.

    old_values are the rollout's, not the current critic's, or nothing is ever clipped. The larger of the two: the
    smaller would reward leaving the range. clip_eps None: unclipped. Statistic value_clip_fraction (N, C).
    """
    plain = (values - returns) ** 2
    if clip_eps is None:
        return 0.5 * plain, {"value_clip_fraction": torch.zeros_like(plain).detach()}
    clipped = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), {"value_clip_fraction": (clipped > plain).detach().to(plain.dtype)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over the mask, V of the rollout; NaN (absent) where the returns do not vary.

    Of float rounding too: a variance of 1e-12 times the square of the returns is none.
    """
    return explained_share(moments(returns - values, mask), moments(returns, mask))


def explained_share(residuals: Moments, returns: Moments) -> Tensor:
    """The same from the moments of R - V and of R, which those of several ranks merge to."""
    varies = returns.var > 1e-12 * returns.mean**2
    return torch.where(varies & (returns.var > 0), 1 - residuals.var / returns.var, torch.nan)


def next_kl_coefficient(
    beta: float, kl_per_sequence: float, *, target_kl_per_sequence: float, num_sequences: int, horizon: int = 10_000
) -> float:
    """Adaptive KL weight (1909.08593 section 2.2): beta (1 + clip(KL / target - 1, +-0.2) n / horizon).

    In nats per sequence (ruling D20), n sequences since the last update. Checkpoint beta.
    """
    if not target_kl_per_sequence > 0:
        raise ValueError(f"target_kl_per_sequence must be above 0, got {target_kl_per_sequence}")
    error = min(max(kl_per_sequence / target_kl_per_sequence - 1, -0.2), 0.2)
    return beta * (1 + error * num_sequences / horizon)
