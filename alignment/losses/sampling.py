"""What is done to samples and their rewards before advantages: unfinished answers, overlong ones, empty groups."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.losses.advantages import grouped, round_rewards


def penalize_unfinished(rewards: Tensor, finished: Tensor, *, penalty: float) -> Tensor:
    """rewards - penalty where no stop token was produced. (N,), (N,) bool. Subtracts; never replaces the score."""
    if penalty < 0:
        raise ValueError(f"missing_eos_penalty is subtracted, so it must be at least 0, got {penalty}")
    return rewards - penalty * (~finished).to(rewards.dtype)


def soft_overlong(lengths: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """DAPO's length penalty to add to the reward (2503.14476 eq. 13): 0, then a slope, then -1. (N,) -> (N,) float32.

    0 up to max_tokens - cache_tokens, falls to -1 at max_tokens, -1 beyond.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"needs 0 < cache_tokens <= max_tokens, got {cache_tokens} and {max_tokens}")
    return ((max_tokens - cache_tokens - lengths.float()) / cache_tokens).clamp(-1.0, 0.0)


def drop_unfinished(mask: Tensor, finished: Tensor) -> Tensor:
    """Overlong filtering (DAPO section 3.4): the loss mask without truncated completions. (N, C), (N,) bool.

    Their rewards still enter their group's mean: filter after the advantages.
    """
    return mask & finished[:, None]


def informative_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Dynamic sampling (DAPO section 3.2): (B,) bool, True where a group's scorable rewards are not all equal.

    By spread, not by a (0, 1) band, so it works for rewards that are not binary (ruling D26). Pass the accuracy reward
    before shaping: a length penalty would make every group look informative.
    """
    groups = grouped(round_rewards(rewards), group_size)
    scored, far = ~groups.isnan(), torch.inf
    return torch.where(scored, groups, -far).amax(1) > torch.where(scored, groups, far).amin(1)
