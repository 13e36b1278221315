"""Entropy of the policy: a bonus, an adaptive weight for it, and the mask that trains only the uncertain tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = logsumexp(z) - sum softmax(z) z over the last dimension, in nats. Temperature is the caller's to apply."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def entropy_bonus(entropy: Tensor, *, coefficient: float) -> Tensor:
    """-coefficient * H per token, to add to a policy loss before its reduction (token mean)."""
    return -coefficient * entropy


def entropy_threshold(entropy: Tensor, *, keep: float) -> Tensor:
    """The (1 - keep) quantile, linear between ranks, of a flat tensor of the entropies of all loss tokens.

    All ranks' tokens: gather first. Sorted by hand, since torch.quantile stops at 16 million values.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep is the share of tokens that train, in (0, 1], got {keep}")
    ordered = entropy.detach().flatten().sort().values
    if not len(ordered):
        return entropy.new_tensor(-torch.inf)
    position = (len(ordered) - 1) * (1 - keep)
    below, above = ordered[int(position)], ordered[min(int(position) + 1, len(ordered) - 1)]
    return torch.lerp(below, above, position - int(position))


def top_entropy_mask(entropy: Tensor, mask: Tensor, *, keep: float, threshold: Tensor | None = None) -> Tensor:
    """(N, C) bool: the loss tokens among the `keep` most uncertain ("Beyond the 80/20 rule", 2506.01939: 0.2).

    Multiply the policy term by it, not the KL. As in TRL, all tokens stay in the denominator (ruling D14), so the loss
    shrinks by about `keep`; to average over kept tokens only, reduce over this mask. threshold: of all ranks, from
    `entropy_threshold`; without it, of this batch.
    """
    limit = entropy_threshold(entropy[mask], keep=keep) if threshold is None else threshold
    return mask & (entropy.detach() >= limit)


def next_entropy_coefficient(
    coefficient: float,
    entropy: float,
    *,
    target: float = 0.2,
    step: float = 0.005,
    minimum: float = 0.0,
    maximum: float = 1.0,
) -> float:
    """Adaptive entropy control (Skywork-OR1, 2505.22312): up by `step` if entropy <= target, else down, within bounds.

    Called once per optimizer step. The coefficient is checkpointed; it applies only in steps for which
    `entropy_is_low` holds of the step before.
    """
    moved = coefficient + step if entropy <= target else coefficient - step
    return min(max(moved, minimum), maximum)


def entropy_is_low(entropy: float, *, target: float = 0.2) -> bool:
    """Whether the bonus applies in the next step."""
    return entropy <= target
