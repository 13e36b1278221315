"""Unpaired labels, desirable or not: KTO and APO-zero.

logprobs, ref_logprobs (N,) sums over each completion; desirable (N,) bool. Losses return (values (N,), statistics).
Statistics of one class are NaN on rows of the other: absent, so that a batch of one class gives no NaN mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mismatched(num_rows: int, *, by: int = 1) -> list[int]:
    """Which completion each prompt is paired with to estimate the KL: a rotation, by default the one before it.

    Prompt i gets completion i - by. Where up to `by` neighbours have the same prompt, none gets one of its own. Raises
    ValueError where they are more than half of the rows; one row's only partner is itself.
    """
    if num_rows < 2 * by:
        raise ValueError(
            f"KTO's KL needs completions of other prompts, but {by} of {num_rows} rows have the same prompt: give rows "
            "with more prompts, or use apo_zero_unpaired, which has no KL"
        )
    return [(row - by) % num_rows for row in range(num_rows)]


def kl_baseline(kl_logprobs: Tensor, kl_ref_logprobs: Tensor) -> Tensor:
    """z0 = max(0, mean log-ratio of mismatched pairs), a detached scalar (2402.01306).

    Over all ranks: gather the (N,) sums first, since the clamp comes after the mean.
    """
    return (kl_logprobs - kl_ref_logprobs).detach().mean().clamp(min=0)


def class_stats(rewards: Tensor, logprobs: Tensor, desirable: Tensor) -> dict[str, Tensor]:
    """rewards and logps of each class, (N,), NaN on the other class's rows."""
    names = {"rewards": rewards.detach(), "logps": logprobs.detach()}
    sides = {"chosen": desirable, "rejected": ~desirable}
    return {f"{n}/{s}": torch.where(rows, x, torch.nan) for n, x in names.items() for s, rows in sides.items()}


def class_means(values: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of the desirable, of the undesirable, and their difference; NaN (absent) for a class without rows."""
    chosen, rejected = values[desirable].mean(), values[~desirable].mean()
    return chosen, rejected, chosen - rejected


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KTO (2402.01306): weight * (1 - sigmoid(+-beta (log-ratio - z0))), kl = z0 from `kl_baseline`.

    The mean over all rows is the loss.
    """
    ratio = logprobs - ref_logprobs
    gain = torch.sigmoid(beta * (ratio - kl.detach()))
    values = torch.where(desirable, desirable_weight * (1 - gain), undesirable_weight * gain)
    return values, class_stats(beta * ratio, logprobs, desirable) | {"kl": kl.detach().expand_as(ratio)}


def apo_zero_unpaired(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """APO-zero on unpaired labels (2408.06266): KTO with z0 = 0, so no KL batch."""
    ratio = logprobs - ref_logprobs
    gain = torch.sigmoid(beta * ratio)
    values = torch.where(desirable, desirable_weight * (1 - gain), undesirable_weight * gain)
    return values, class_stats(beta * ratio, logprobs, desirable)


KTO_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


# KTO's eq. 8 asks for 4/3; the usual code, and here, rounds it.
MAX_CLASS_RATIO = 1.33


def desirable_weights(
    num_desirable: int, num_undesirable: int, *, undesirable_weight: float = 1.0
) -> tuple[float, float]:
    """Least and largest desirable weight for which the desirable rows weigh 1 to 4/3 times the others (eq. 8)."""
    equal = undesirable_weight * num_undesirable / num_desirable
    return equal, MAX_CLASS_RATIO * equal


def undesirable_weights(
    num_desirable: int, num_undesirable: int, *, desirable_weight: float = 1.0
) -> tuple[float, float]:
    """The same for the undesirable weight, where the desirable one is given."""
    equal = desirable_weight * num_desirable / num_undesirable
    return equal / MAX_CLASS_RATIO, equal
