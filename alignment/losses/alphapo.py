"""AlphaPO: SimPO with a bent reward."""

from __future__ import annotations

from torch import Tensor

from alignment.losses.dpo import Pairs, alpha_divergence, smoothed_logistic


def alphapo(
    pairs: Pairs, *, beta: float, alpha: float, gamma_beta_ratio: float = 0.04, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO's loss on (1 - exp(-alpha x)) / alpha instead of x, (B,): AlphaPO (2501.03884), x an average log-prob.

    alpha -> 0 is SimPO; the paper's best is alpha 0.25, beta 2.5, gamma 0.1. For alpha > 0 the reward of improbable
    text grows exponentially; the exponent is clamped.
    """
    chosen = alpha_divergence(pairs.chosen_average, alpha=alpha)
    rejected = alpha_divergence(pairs.rejected_average, alpha=alpha)
    return smoothed_logistic(beta * (chosen - rejected - gamma_beta_ratio), label_smoothing)
