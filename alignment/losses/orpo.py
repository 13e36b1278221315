"""ORPO: likelihood of the chosen answer and the log-odds of choosing it, without a reference."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.dpo import Pairs

# A probability of exactly 1 has infinite odds; this is where they stop.
MAX_AVERAGE = -1e-6


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, by the branch that keeps its digits (Maechler 2012)."""
    near = x > -math.log(2)
    # Each branch gets a harmless argument where the other is taken, or its infinite slope times 0 would be NaN.
    by_expm1 = (-torch.expm1(torch.where(near, x, -0.5))).log()
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, by_expm1, by_log1p)


def log_odds(average: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(average log-prob)."""
    average = average.clamp(max=MAX_AVERAGE)
    return average - log1mexp(average)


def orpo(pairs: Pairs, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), (B,): ORPO (2403.07691 eqs. 6, 7), beta its lambda.

    `pairs` has a reference of 0. The caller adds the NLL of the chosen answers (weight 1), a token mean over the
    completion (ruling D18), or over prompt and completion to reproduce the official runs. Statistics (B,).
    """
    difference = log_odds(pairs.chosen_average) - log_odds(pairs.rejected_average)
    ratio = F.logsigmoid(difference)
    return -beta * ratio, {"log_odds_chosen": difference.detach(), "log_odds_ratio": ratio.detach()}
