"""Process reward models: labels at step ends, their losses, scores of solutions, rewards along a completion.

A step ends at its last separator token; labels (N, C) int64 are -100 everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.reduce import masked_mean
from alignment.losses.token_rewards import last_token, place_scores

IGNORE = -100


def label_steps(
    prompt_ids: Sequence[int],
    steps_ids: Sequence[Sequence[int]],
    step_labels: Sequence[int | bool],
    separator_ids: Sequence[int],
    *,
    train_on_last_step_only: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids and labels of a solution: each step, then the separator, labelled on the separator's last token.

    Steps are tokenised one by one, so that no token merges across the separator. Raises ValueError where steps and
    labels do not match, or without a separator.
    """
    if len(steps_ids) != len(step_labels):
        raise ValueError(f"{len(steps_ids)} steps have {len(step_labels)} labels: one each is needed")
    if not separator_ids:
        raise ValueError("the label of a step stands on its separator: separator_ids must not be empty")
    ids, labels = list(prompt_ids), [IGNORE] * len(prompt_ids)
    for number, (step, label) in enumerate(zip(steps_ids, step_labels, strict=True), 1):
        used = number == len(steps_ids) or not train_on_last_step_only
        piece = [*step, *separator_ids]
        ids += piece
        labels += [IGNORE] * (len(piece) - 1) + [int(label) if used else IGNORE]
    return ids, labels


def step_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Two-class cross-entropy (bad, good) at each labelled token: logits (N, C, 2) -> values and mask (N, C).

    "Let's Verify Step by Step" (2305.20050) and 2211.14275; the loss is the mean over labelled steps.
    """
    mask = labels != IGNORE
    logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(mask, -logprobs, 0.0), mask


def step_binary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same with one logit (N, C) and targets in [0, 1], so soft labels too; -100 where there is none."""
    mask = targets != IGNORE
    values = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype).clamp(0, 1), reduction="none")
    return torch.where(mask, values, 0.0), mask


def _product(probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, probs, 1.0).prod(-1)


def _least(probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, probs, torch.inf).amin(-1)


def _last(probs: Tensor, mask: Tensor) -> Tensor:
    return probs.gather(-1, last_token(mask)[:, None]).squeeze(-1)


def _mean(probs: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(probs, mask, -1)


# How P(good) of the steps (N, C) under mask becomes the score of a solution (N,); Math-Shepherd takes the minimum.
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"min": _least, "prod": _product, "last": _last, "mean": _mean}


def solution_score(probs: Tensor, mask: Tensor, kind: str = "min") -> Tensor:
    """(N,) score of each solution; NaN for one without steps. Raises ValueError for an unknown kind."""
    if kind not in SCORES:
        raise ValueError(f"solution score {kind!r} does not exist: choose from {', '.join(SCORES)}")
    return torch.where(mask.any(-1), SCORES[kind](probs, mask), torch.nan)


def step_rewards(probs: Tensor, step_ends: Tensor, mask: Tensor, outcome: Tensor, *, baseline: float = 0.0) -> Tensor:
    """Rewards along a completion (N, C): p_k - baseline at step ends, plus the outcome (N,) at the last token."""
    return torch.where(step_ends & mask, probs - baseline, 0.0) + place_scores(outcome, mask)


def step_stats(prob_good: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """accuracy and brier score of each labelled step (N, C), NaN elsewhere; first_error of each solution (N,).

    first_error: 1 if the first step scored below 1/2 is the first bad one (or neither exists).
    """
    mask, p = labels != IGNORE, prob_good.detach()
    said, good = p > 0.5, labels == 1
    step = {"accuracy": (said == good).to(p.dtype), "brier": (p - good.to(p.dtype)) ** 2}
    values = {name: torch.where(mask, value, torch.nan) for name, value in step.items()}
    found = (_first(mask & ~said) == _first(mask & ~good)).to(p.dtype)
    return values | {"first_error": torch.where(mask.any(-1), found, torch.nan)}


def _first(hits: Tensor) -> Tensor:
    """Index of the first True of each row; the width where there is none."""
    positions = torch.arange(hits.shape[-1], device=hits.device)
    return torch.where(hits, positions, hits.shape[-1]).amin(-1)


def f1_counts(prob_good: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """For each class (true positives, predicted, actual), (3,): sum over ranks, then `f1`."""
    mask, said = labels != IGNORE, prob_good.detach() > 0.5
    counts = {}
    for name, positive in (("good", 1), ("bad", 0)):
        predicted, actual = mask & (said == bool(positive)), labels == positive
        counts[name] = torch.stack([(predicted & actual).sum(), predicted.sum(), actual.sum()])
    return counts


def f1(counts: Tensor) -> Tensor:
    """2 TP / (predicted + actual); NaN (absent) where the class is neither predicted nor present."""
    both = counts[1] + counts[2]
    return torch.where(both > 0, 2 * counts[0] / both.clamp(min=1), torch.nan)
