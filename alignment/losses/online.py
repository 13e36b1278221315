"""Preferences made on the fly: pairs from scores, XPO and Nash-MD."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.losses.advantages import grouped
from alignment.losses.dpo import Pairs
from alignment.losses.reduce import masked_sum


class Pairing(NamedTuple):
    """For each prompt, which of its completions is chosen and which rejected, (B,) each.

    chosen, rejected: indices into the N rows. weight: 0 for a pair that says nothing (equal or missing scores), else 1;
    multiply the pair loss by it and average over its sum. margin: score difference, NaN without two scores.
    """

    chosen: Tensor
    rejected: Tensor
    weight: Tensor
    margin: Tensor


def pair_by_score(scores: Tensor, group_size: int = 2) -> Pairing:
    """Best against worst completion of each prompt, scores (N,), N = B * G, NaN = unscorable.

    Ties go to the first sample, so that the result is a function of the scores; a tied pair weighs 0 (ruling D25),
    since training on it is training on noise.
    """
    groups = grouped(scores, group_size)
    best, worst = _ordered(groups)
    margin = (groups.gather(1, best) - groups.gather(1, worst)).squeeze(1)
    margin = torch.where((~groups.isnan()).sum(1) > 1, margin, torch.nan)
    first = torch.arange(len(groups), device=scores.device) * group_size
    return Pairing(first + best.squeeze(1), first + worst.squeeze(1), (margin > 0).to(scores.dtype), margin)


def _ordered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the best and of the worst scored sample, (B, 1); of equals the first and the last."""
    known = torch.where(groups.isnan(), -torch.inf, groups)
    order = torch.sort(known, stable=True, dim=1, descending=True).indices
    last = ((~groups.isnan()).sum(1, keepdim=True) - 1).clamp(min=0)
    return order[:, :1], order.gather(1, last)


def pair_by_preference(prob_first: Tensor) -> Pairing:
    """The same from a judge: P(first of two is better) (B,); 0.5 is a tie."""
    return pair_by_score(torch.stack([prob_first, 1 - prob_first], 1).flatten())


def xpo(
    pairs: Pairs, reference_sample_logprobs: Tensor, *, loss: Callable[[Pairs], Tensor], alpha: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """XPO (2405.21046 algorithm 1): the pair's loss + alpha * log p(y_ref), (B,).

    One sample of each pair is the policy's, the other the reference's; reference_sample_logprobs (B,) is the policy's
    summed log-prob of the latter, whether it won or lost. The plus sign moves mass off it: optimism.
    loss: of `dpo.pair_loss`. Statistics: dpo and xpo terms (B,).
    """
    preference, optimism = loss(pairs), alpha * reference_sample_logprobs
    return preference + optimism, {"dpo_loss": preference.detach(), "xpo_loss": optimism.detach()}


def mixture_logprobs(policy_logits: Tensor, ref_logits: Tensor, *, mixture_coef: float) -> Tensor:
    """Nash-MD's opponent, log-probs (..., V): the token-wise geometric mixture, 0 = policy, 1 = reference."""
    if not 0 <= mixture_coef <= 1:
        raise ValueError(f"mixture_coef must be in [0, 1], got {mixture_coef}")
    return ((1 - mixture_coef) * policy_logits + mixture_coef * ref_logits).log_softmax(-1)


def nash_md(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, win_prob: Tensor, *, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Nash-MD (2312.00886): [beta sg(sum_t d) - (P - 1/2)] sum_t log p, (N,), d the log-ratio.

    win_prob P (N,): that the policy's sample beats the mixture's; 1/2 is the control variate. The KL is the whole
    sequence's (ruling D17): weighing each token by its own d is a partial gradient.
    Statistics (N,): win_prob, kl (summed d), score_loss.
    """
    total = masked_sum(logprobs, mask, -1)
    kl = masked_sum(logprobs - ref_logprobs, mask, -1).detach()
    score = -(win_prob - 0.5) * total
    values = score + beta * kl * total
    return values, {"win_prob": win_prob.detach(), "kl": kl, "score_loss": score.detach()}
