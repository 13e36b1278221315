"""Preferences of pairs: DPO and its relatives, one small function each, one value per pair.

All read a `Pairs`. With a = log(policy / reference) of the chosen and b of the rejected completion, the implicit reward
is beta * a. Losses of the difference a - b allow other f-divergences; those of a and b apart do not, because the
prompt's normaliser log Z only cancels in the difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.options import choose
from alignment.losses.reduce import masked_mean, masked_sum


@dataclass(frozen=True)
class Pairs:
    """Sequence log-prob sums and lengths in tokens, (B,) each, float32 or wider.

    Sums of bfloat16 log-probs lose the margin: sum in float32.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def chosen_average(self) -> Tensor:
        """Log-ratio per token; an empty completion divides by 1."""
        return self.chosen_ratio / self.num_chosen.clamp(min=1)

    @property
    def rejected_average(self) -> Tensor:
        return self.rejected_ratio / self.num_rejected.clamp(min=1)

    @property
    def average_margin(self) -> Tensor:
        return self.chosen_average - self.rejected_average


def pairs_from_tokens(logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, *, ld_alpha: float = 1.0) -> Pairs:
    """Pairs from (2B, C) token log-probs whose rows alternate chosen, rejected.

    ref_logprobs None: a reference of 0, so that ratios are log-probs, for the losses that have no reference.
    ld_alpha: LD-DPO (2409.06411): tokens beyond the shorter length of a pair weigh ld_alpha, for the policy and the
    reference alike (so a stored reference must be per token). 1 is DPO, 0 drops the tails; the paper starts at 0.5.
    """
    if not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha must be in [0, 1], got {ld_alpha}")
    shared = shared_length(mask)
    reference = torch.zeros_like(logprobs) if ref_logprobs is None else ref_logprobs
    sums = [masked_sum(torch.where(shared, x, ld_alpha * x), mask, -1) for x in (logprobs, reference)]
    (chosen, rejected), (ref_chosen, ref_rejected) = (x.view(-1, 2).unbind(-1) for x in sums)
    num_chosen, num_rejected = mask.sum(-1).to(logprobs.dtype).view(-1, 2).unbind(-1)
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, num_chosen, num_rejected)


def shared_length(mask: Tensor) -> Tensor:
    """(2B, C) bool: the tokens of a row up to the shorter length of its pair."""
    shorter = mask.sum(-1).view(-1, 2).amin(-1).repeat_interleave(2)[:, None]
    return mask.cumsum(-1) <= shorter


# ---- f-divergences (2309.16240): what replaces a log-ratio x = log u in losses of the difference -------------------

# exp(40) = 2e17 squared still fits float32, which the squared loss of ipo needs. Beyond it the score is constant.
MAX_EXPONENT = 40.0


def reverse_kl(x: Tensor) -> Tensor:
    return x


def forward_kl(x: Tensor) -> Tensor:
    """1 - 1/u. Explodes for a chosen or rejected completion the policy has dropped."""
    return -torch.expm1((-x).clamp(max=MAX_EXPONENT))


def js_divergence(x: Tensor) -> Tensor:
    """log(2 u / (1 + u))."""
    return math.log(2) + F.logsigmoid(x)


def alpha_divergence(x: Tensor, *, alpha: float = 0.5) -> Tensor:
    """(1 - u^-alpha) / alpha, the paper's form (ruling D21): alpha = 1 is forward KL, alpha -> 0 reverse KL."""
    if alpha == 0:
        return x
    return -torch.expm1((-alpha * x).clamp(max=MAX_EXPONENT)) / alpha


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


def scored(pairs: Pairs, divergence: str, *, alpha: float | None = None) -> Pairs:
    """Pairs whose ratios are the divergence's scores. alpha only with alpha_divergence."""
    score = choose(DIVERGENCES, divergence, alpha=alpha)
    chosen, rejected = score(pairs.chosen_ratio), score(pairs.rejected_ratio)
    zero = torch.zeros_like(chosen)
    return dataclasses.replace(pairs, chosen=chosen, rejected=rejected, ref_chosen=zero, ref_rejected=zero)


# ---- losses of the difference -------------------------------------------------------------------------------------


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z): e is the share of labels taken as flipped."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is the share of flipped labels, in [0, 0.5), got {label_smoothing}")
    plain = -(1 - label_smoothing) * F.logsigmoid(logits)
    return plain - label_smoothing * F.logsigmoid(-logits) if label_smoothing else plain


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (2305.18290 eq. 7); with smoothing, conservative DPO (Mitchell's note eq. 3; ruling D1)."""
    return smoothed_logistic(beta * pairs.margin, label_smoothing)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Robust DPO (2403.00409): unbiased if that share of labels is flipped; not bounded below."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"robust needs label_smoothing in [0, 0.5), got {label_smoothing}")
    z = beta * pairs.margin
    right, wrong = -F.logsigmoid(z), -F.logsigmoid(-z)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def hinge(pairs: Pairs, *, beta: float) -> Tensor:
    """max(0, 1 - beta * margin): SLiC (2305.10425) as RSO's hinge-norm (2309.06657). beta is 1 / margin."""
    return F.relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, *, beta: float, length_average: bool = True) -> Tensor:
    """IPO (2310.12036 eq. 17), beta its tau: (margin - 1 / (2 beta))^2.

    Log-ratios per token by default, as its authors confirmed (ruling D2): the target is one length for all pairs.
    """
    return ((pairs.average_margin if length_average else pairs.margin) - 0.5 / beta) ** 2


def sigmoid_norm(pairs: Pairs, *, beta: float) -> Tensor:
    """Length-normalised DPO (Tülu 3, 2411.15124): per-token ratios, so beta is about 5, not 0.1."""
    return -F.logsigmoid(beta * pairs.average_margin)


def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO (2402.00856 eq. 16): KL of sigmoid(z) to the smoothed label (1 - e, e). Needs e > 0; 1e-3 is usual."""
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"exo_pair takes the log of label_smoothing: it must be in (0, 0.5), got {label_smoothing}")
    z = beta * pairs.margin
    right, wrong = F.logsigmoid(z), F.logsigmoid(-z)
    return right.exp() * (right - math.log1p(-label_smoothing)) + wrong.exp() * (wrong - math.log(label_smoothing))


def discopop(pairs: Pairs, *, beta: float, tau: float = 0.05) -> Tensor:
    """DiscoPOP (2406.08414 eq. 5): logistic and exponential loss mixed by m = sigmoid(z / tau). Not monotone in z."""
    z = beta * pairs.margin
    mix = torch.sigmoid(z / tau)
    return -F.logsigmoid(z) * (1 - mix) + (-z).clamp(max=20).exp() * mix


# ---- losses of each side ------------------------------------------------------------------------------------------


def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """NCA (2402.05369): raises the chosen absolutely, against both as noise."""
    a, b = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -F.logsigmoid(a) - 0.5 * F.logsigmoid(-a) - 0.5 * F.logsigmoid(-b)


def bco_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """BCO on pairs with shift 0 (2404.04656): two binary cross-entropies (ruling D22)."""
    return -F.logsigmoid(beta * pairs.chosen_ratio) - F.logsigmoid(-beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """SPPO with hard labels (2405.00675 eq. 4.7), beta = 1 / eta (1e-3 in the paper): ratios to +-1 / (2 beta)."""
    return (pairs.chosen_ratio - 0.5 / beta) ** 2 + (pairs.rejected_ratio + 0.5 / beta) ** 2


def aot(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT paired (2406.05882): margins of policy and reference, each sorted over the batch: depends on its size.

    The b-th value belongs to the b-th quantile, not to pair b. Gather over ranks before, if you can.
    """
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return smoothed_logistic(beta * (policy.sort().values - reference.sort().values), label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT unpaired (2406.05882): ratios of chosen and rejected, each sorted over the batch; wants a large one."""
    gap = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed_logistic(beta * gap, label_smoothing)


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """APO-zero (2408.06266 eq. 7): chosen up, rejected down; for a policy worse than the chosen answers."""
    return torch.sigmoid(-beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """APO-down (2408.06266 eq. 8): both down, rejected more; for a policy better than the chosen answers."""
    return torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(-beta * pairs.margin)


# Of the difference: any f-divergence. Each takes (pairs, *, beta, ...) and returns (B,).
DIFFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": exo_pair,
    "discopop": discopop,
}
# Of each side, or of quantiles of the batch: reverse KL only.
ABSOLUTE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}
LOSSES: dict[str, Callable[..., Tensor]] = DIFFERENCE_LOSSES | ABSOLUTE_LOSSES
# One value belongs to a quantile of the batch, so a weight per pair has nothing to multiply.
SORTED_LOSSES = frozenset({"aot", "aot_unpaired"})


def pair_loss(
    name: str,
    *,
    beta: float,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    **options: float | bool | None,
) -> Callable[[Pairs], Tensor]:
    """The loss `name` with its options bound: Pairs -> (B,). Checked here, before any batch.

    options: label_smoothing, length_average, tau; None means the loss's default. Raises ValueError for an unknown name
    or divergence, for an option the loss cannot use, and for a divergence other than reverse_kl where log Z would stay.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    loss = choose(LOSSES, name, beta=beta, **options)
    if divergence == "reverse_kl" and alpha is None:
        return loss
    if name not in DIFFERENCE_LOSSES and divergence != "reverse_kl":
        raise ValueError(
            f"{name} cannot use divergence={divergence!r}, the prompt's normaliser would not cancel: "
            f"choose reverse_kl, or one of {', '.join(DIFFERENCE_LOSSES)}"
        )
    choose(DIVERGENCES, divergence, alpha=alpha)
    return lambda pairs: loss(scored(pairs, divergence, alpha=alpha))


def weighted_losses(losses: Mapping[str, Callable[[Pairs], Tensor]], weights: Mapping[str, float]) -> Callable:
    """Several losses at once: Pairs -> (B,), sum_k w_k loss_k.

    MPO (2411.10442) is 0.8 sigmoid + 0.2 bco_pair + 1.0 NLL; RPO (2405.16436) sigmoid + 0.005 NLL. The NLL of the
    chosen answers is a token mean and is added after the reduction (ruling D23).
    Raises ValueError where names of losses and weights differ.
    """
    if set(losses) != set(weights):
        raise ValueError(f"losses {sorted(losses)} and weights {sorted(weights)} must name the same losses")
    return lambda pairs: torch.stack([weights[name] * loss(pairs) for name, loss in losses.items()]).sum(0)


def irpo_nll(pairs: Pairs) -> Tensor:
    """NLL per token of each chosen completion, (B,): IRPO's term, a mean per example and not per token."""
    return -pairs.chosen / pairs.num_chosen.clamp(min=1)


def wpo_weights(
    logprobs: Tensor, log_sum_sq_probs: Tensor | None, mask: Tensor, *, clamp: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """WPO (2406.11827): how on-policy each pair is, (B,), detached, to multiply a pairwise loss by (not an added NLL).

    w = exp(mean_t(log p_t - log sum_v p_v^2)) of each completion, rows alternating chosen, rejected; a pair weighs
    w_chosen * w_rejected. log_sum_sq_probs None: without the alignment. clamp: at most 1, as in the official code
    (ruling D3), since aligned weights do exceed 1. Not for losses that sort the batch.
    Statistic: wpo_weight (B,); if its mean collapses the data are far off-policy.
    """
    alignment = 0.0 if log_sum_sq_probs is None else log_sum_sq_probs
    weights = masked_mean((logprobs - alignment).detach(), mask, -1).exp().view(-1, 2).prod(-1)
    weights = weights.clamp(max=1.0) if clamp else weights
    return weights, {"wpo_weight": weights}


def pair_stats(pairs: Pairs, *, beta: float, per_token: bool = False) -> dict[str, Tensor]:
    """Implicit rewards, margins, accuracies (strict: a tie is wrong) and log-probs, (B,), detached.

    Reverse-KL rewards whatever the loss, so that runs compare; per token for losses of averages. Watch logps/chosen
    fall: likelihood displacement.
    """
    sides = (pairs.chosen_average, pairs.rejected_average) if per_token else (pairs.chosen_ratio, pairs.rejected_ratio)
    a, b = (side.detach() for side in sides)
    return {
        "rewards/chosen": beta * a,
        "rewards/rejected": beta * b,
        "rewards/margins": beta * (a - b),
        "rewards/accuracies": (a > b).to(a.dtype),
        "logps/chosen": pairs.chosen.detach(),
        "logps/rejected": pairs.rejected.detach(),
    }
