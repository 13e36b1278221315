"""SimPO: average log-probs as rewards, with a target margin and no reference."""

from __future__ import annotations

from torch import Tensor

from alignment.losses.dpo import Pairs, smoothed_logistic


def simpo(pairs: Pairs, *, beta: float, gamma_beta_ratio: float = 0.5, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta (c - r - gamma_beta_ratio)), (B,): SimPO (2405.14734 eq. 6), c and r average log-probs.

    One knob for the margin, gamma / beta as in the official code: the margin in average log-prob, whatever beta.
    `pairs` has a reference of 0. No likelihood term: CPO-SimPO adds one. beta is 2 to 10, since averages are small.
    """
    return smoothed_logistic(beta * (pairs.average_margin - gamma_beta_ratio), label_smoothing)
