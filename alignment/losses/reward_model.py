"""Reward models from pairs: Bradley-Terry with its options, and what to report."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None = None,
    prob_chosen: Tensor | float | None = None,
    center_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(r_w - r_l - margin) + center_coef (r_w + r_l)^2, (B,); scores (B,) float32.

    margin (B,): larger for clearer preferences (Llama 2, 2307.09288 eq. 2). prob_chosen: soft labels p, for
    -p log sigmoid(d) - (1 - p) log sigmoid(-d). center_coef: "Helping or Herding" (2312.09244) recommends 1e-2; the
    loss is blind to a shift per prompt, so without it scores of different prompts do not compare.
    log(1 + exp(-d)), offered elsewhere as a loss of its own, is this loss written so that it overflows.
    """
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    values = -F.logsigmoid(gap)
    if prob_chosen is not None:
        p = torch.as_tensor(prob_chosen, dtype=gap.dtype, device=gap.device)
        if ((p < 0) | (p > 1)).any():
            raise ValueError("prob_chosen must be in [0, 1]: it is the probability that the chosen answer is better")
        values = p * values - (1 - p) * F.logsigmoid(-gap)
    if center_coef:
        values = values + center_coef * (chosen + rejected) ** 2
    return values, reward_model_stats(chosen, rejected)


def reward_model_stats(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """(B,), detached. accuracy: strict, a tie is wrong; accuracy_half: a tie is half; ties; margin; confidence.

    confidence is sigmoid(r_w - r_l): its mean over the accuracy says how calibrated the model is.
    """
    gap = (chosen - rejected).detach()
    right, tie = (gap > 0).to(gap.dtype), (gap == 0).to(gap.dtype)
    return {
        "accuracy": right,
        "accuracy_half": right + 0.5 * tie,
        "ties": tie,
        "margin": gap,
        "confidence": torch.sigmoid(gap),
        "rewards/chosen": chosen.detach(),
        "rewards/rejected": rejected.detach(),
    }


def regression(scores: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(score - target)^2 of each completion, (N,), and the absolute error: for data with a number for each answer."""
    gap = scores - targets
    return gap**2, {"absolute_error": gap.detach().abs()}


# Bins of the calibration error: of confidences from 1/2 to 1, so each is 5 points wide.
NUM_BINS = 10


def calibration_gaps(gaps: Tensor, *, num_bins: int = NUM_BINS) -> Tensor:
    """Sum of (right - confidence) over the pairs of each bin, (num_bins,) float64; gaps (...) are r_w - r_l.

    confidence is that of the answer the model prefers, sigmoid(|gap|), in equal bins from 1/2 to 1; a tie is half
    right. Add these up over batches and ranks, then `calibration_error`.
    """
    gaps = gaps.detach().double().flatten()
    confidence = torch.sigmoid(gaps.abs())
    right = (gaps > 0).double() + 0.5 * (gaps == 0).double()
    which = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    return torch.zeros(num_bins, dtype=torch.float64, device=gaps.device).index_add_(0, which, right - confidence)


def calibration_error(sums: Tensor, count: float) -> Tensor:
    """Expected calibration error (1706.04599 eq. 3): the bins' |accuracy - confidence|, weighed by their pairs."""
    return sums.abs().sum() / count


def margin_accuracy(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """1 where r_w > r_l + margin, (B,): stricter than accuracy, for data that has margins."""
    return (chosen > rejected + margin).to(chosen.dtype)


def score_range(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """min, mean, max and ddof-1 std of all 2B scores."""
    scores = torch.cat([chosen, rejected]).detach()
    return {"min": scores.min(), "mean": scores.mean(), "max": scores.max(), "std": scores.std()}
