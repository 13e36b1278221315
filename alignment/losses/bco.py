"""BCO: a classifier of desirable and undesirable completions around a moving shift."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.kto import class_stats
from alignment.losses.reduce import Moments, moments, no_moments


class ClassMoments(NamedTuple):
    """Running moments of the rewards of each class; checkpoint them. Over ranks: gather rewards and labels first."""

    desirable: Moments
    undesirable: Moments

    @classmethod
    def start(cls, like: Tensor) -> ClassMoments:
        return cls(no_moments(like), no_moments(like))

    def update(self, rewards: Tensor, desirable: Tensor) -> ClassMoments:
        """With the rewards beta * log-ratio (N,) of one more batch, before its loss."""
        return ClassMoments(
            self.desirable.merge(moments(rewards, desirable)), self.undesirable.merge(moments(rewards, ~desirable))
        )


def midpoint(seen: ClassMoments) -> Tensor:
    """Half way between the class means, where the bound on the DPO loss is tightest (ruling D19).

    While one class has not been seen yet, the other's mean.
    """
    means = torch.stack([seen.desirable.mean, seen.undesirable.mean])
    weights = torch.stack([seen.desirable.count > 0, seen.undesirable.count > 0]).to(means.dtype)
    return (means * weights).sum() / weights.sum().clamp(min=1)


def running_mean(seen: ClassMoments) -> Tensor:
    """Mean over both classes, as the usual code has it: right only where labels are balanced."""
    return seen.desirable.merge(seen.undesirable).mean


SHIFTS: dict[str, Callable[[ClassMoments], Tensor]] = {"midpoint": midpoint, "running_mean": running_mean}


def bco(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    *,
    shift: Tensor,
    beta: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """BCO (2404.04656): -log sigmoid(+-(r - shift)), r = beta * log-ratio of the sums, (N,).

    shift: a scalar of `SHIFTS`, detached. weights: from `udm_weights`. Statistics (N,), as for KTO.
    """
    rewards = beta * (logprobs - ref_logprobs)
    logits = rewards - shift.detach()
    values = -F.logsigmoid(torch.where(desirable, logits, -logits))
    stats = class_stats(rewards, logprobs, desirable) | {"shift": shift.detach().expand_as(rewards)}
    if weights is None:
        return values, stats
    return values * weights, stats | {"udm_weight": torch.where(desirable, torch.nan, weights)}


def udm_weights(
    prob_desirable: Tensor, desirable: Tensor, *, min_density_ratio: float = 0.5, max_density_ratio: float = 10.0
) -> Tensor:
    """BCO's underlying distribution matching (N,): clipped p / (1 - p) of an undesirable row's prompt, 1 for others.

    prob_desirable (N,): how likely each prompt is to come from the desirable set, of a `PromptClassifier`.
    """
    ratio = prob_desirable / (1 - prob_desirable + 1e-8)
    return torch.where(desirable, torch.ones_like(ratio), ratio.clamp(min_density_ratio, max_density_ratio))


class PromptClassifier(NamedTuple):
    """P(desirable | prompt) from a prompt's embedding: logistic regression."""

    weight: Tensor
    bias: Tensor

    def __call__(self, embeddings: Tensor) -> Tensor:
        """(N, D) -> (N,)."""
        return torch.sigmoid(embeddings.to(self.weight.dtype) @ self.weight + self.bias)


def fit_prompt_classifier(
    embeddings: Tensor, desirable: Tensor, *, l2: float = 1.0, num_iterations: int = 1000
) -> PromptClassifier:
    """Fit on prompts of both classes, in float64: balanced class weights, l2 / 2 * |weight|^2, bias free.

    embeddings (N, D), desirable (N,) bool. Raises ValueError where a class is missing.
    """
    counts = torch.stack([(~desirable).sum(), desirable.sum()])
    if not counts.all():
        raise ValueError(
            f"the prompt classifier needs prompts of both classes, got {counts[1]} desirable of {len(desirable)}"
        )
    x, y = embeddings.detach().double(), desirable.double()
    balance = len(desirable) / (2 * counts.double())[desirable.long()]
    parameters = x.new_zeros(x.shape[1] + 1, requires_grad=True)
    solver = torch.optim.LBFGS(
        [parameters],
        max_iter=num_iterations,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        logits = x @ parameters[:-1] + parameters[-1]
        losses = F.binary_cross_entropy_with_logits(logits, y, weight=balance, reduction="sum")
        objective = losses + 0.5 * l2 * parameters[:-1].square().sum()
        objective.backward()
        return objective

    with torch.enable_grad():
        solver.step(closure)
    fitted = parameters.detach()
    return PromptClassifier(fitted[:-1], fitted[-1])
