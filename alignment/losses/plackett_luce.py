"""Ranked lists: Plackett-Luce and all-pairs Bradley-Terry, for reward models and for DPO.

scores (N, K) in order, best first; mask (N, K) bool, a prefix of each row. Values are per list, (N,); lists of fewer
than two say nothing: their value is 0, and `ranked` leaves them out of the mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.reduce import masked_sum


def ranked(mask: Tensor) -> Tensor:
    """(N,) bool: lists with something to compare. The loss is the mean over these."""
    return mask.sum(-1) >= 2


def plackett_luce(scores: Tensor, mask: Tensor) -> Tensor:
    """-sum_k [s_k - logsumexp(s_k .. s_K)]: NLL of the whole order (DPO, 2305.18290 App. A.3). K = 2 is Bradley-Terry.

    Ties: average over the orders of the tied, or use `all_pairs`.
    """
    # The lowest number of the type stands for -inf, whose gradient would be NaN.
    filled = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    tails = filled.flip(-1).logcumsumexp(-1).flip(-1)
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    return masked_sum(tails - scores, mask & ~last, -1)


def _pairs(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Score differences better - worse (N, K, K), and which of them are pairs of one list."""
    above = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool, device=mask.device).triu(1)
    return scores[:, :, None] - scores[:, None, :], mask[:, :, None] & mask[:, None, :] & above


def all_pairs(scores: Tensor, mask: Tensor) -> Tensor:
    """Bradley-Terry averaged over a list's pairs (InstructGPT, 2203.02155 eq. 1): K does not reweight prompts."""
    gaps, valid = _pairs(scores, mask)
    return masked_sum(-F.logsigmoid(gaps), valid, -1).sum(-1) / valid.sum((-1, -2)).clamp(min=1)


def ranked_dpo(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """Plackett-Luce DPO (2305.18290 App. A.3): scores are beta * log-ratios of the sequence sums (N, K)."""
    return plackett_luce(beta * (logprobs - ref_logprobs), mask)


def ranking_stats(scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """top1_accuracy and pair_accuracy (= (Kendall tau + 1) / 2 without ties; a tie is wrong), (N,), NaN where K < 2."""
    scores, some = scores.detach(), ranked(mask)
    gaps, valid = _pairs(scores, mask)
    others = torch.where(mask, scores, -torch.inf)[:, 1:].amax(-1) if scores.shape[-1] > 1 else scores[:, 0]
    right = masked_sum((gaps > 0).to(scores.dtype), valid, -1).sum(-1) / valid.sum((-1, -2)).clamp(min=1)
    values = {"top1_accuracy": (scores[:, 0] > others).to(scores.dtype), "pair_accuracy": right}
    return {name: torch.where(some, value, torch.nan) for name, value in values.items()}
