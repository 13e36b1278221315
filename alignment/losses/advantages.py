"""Advantages without a critic: how much better a completion is than others of its prompt.

Rewards are (N,), N = B * G, row n belongs to prompt n // G, for all ranks together: gather before grouping. NaN is an
unscorable completion: it enters no statistic and its advantage is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.losses.options import choose
from alignment.losses.reduce import Moments, moments, whiten

# Two rewards closer than this are the same reward: float noise divided by a tiny std would look like a signal.
REWARD_DIGITS = 6
# Added to the std (TRL's; verl 1e-6, OpenRLHF 1e-9): the larger value bounds what near ties are blown up to (D9).
STD_EPS = 1e-4


def grouped(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) -> (B, G). Raises ValueError for a group of fewer than 2, or where N is not a multiple of G."""
    num_rows = len(rewards)
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: completions are compared within a group, so it must be at least 2")
    if num_rows % group_size:
        valid = [size for size in range(2, num_rows + 1) if num_rows % size == 0]
        raise ValueError(f"{num_rows} rewards are not whole groups of {group_size}: group_size can be one of {valid}")
    return rewards.view(-1, group_size)


def group_statistics(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, ddof-1 std and count of the scorable rewards of each group, (B, 1) each. Fewer than two: std 0."""
    scored = ~groups.isnan()
    count = scored.sum(1, keepdim=True)
    mean = torch.where(scored, groups, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(scored, (groups - mean) ** 2, 0.0).sum(1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt(), count


def by_group(groups: Tensor, *, eps: float = STD_EPS) -> Tensor:
    """(r - mean) / (std + eps) within the group: GRPO (2402.03300 section 4.1.2)."""
    mean, std, _ = group_statistics(groups)
    return (groups - mean) / (std + eps)


def by_batch(groups: Tensor, *, eps: float = STD_EPS, of: Moments | None = None) -> Tensor:
    """(r - group mean) / (std over all raw rewards + eps): Lite PPO (2508.08221). `of`: moments over all ranks."""
    mean, _, _ = group_statistics(groups)
    return (groups - mean) / ((moments(groups) if of is None else of).unbiased_var.sqrt() + eps)


def centered(groups: Tensor) -> Tensor:
    """r - group mean: Dr. GRPO (2503.20783)."""
    return groups - group_statistics(groups)[0]


def leave_one_out(groups: Tensor) -> Tensor:
    """r - mean of the others = G / (G - 1) * (r - mean): RLOO (2402.14740). A lone scorable sample gets 0."""
    mean, _, count = group_statistics(groups)
    return (groups - mean) * count / (count - 1).clamp(min=1)


SCALES = {"group": by_group, "batch": by_batch, "none": centered, "leave_one_out": leave_one_out}


def round_rewards(rewards: Tensor) -> Tensor:
    """Rewards rounded to 1e-6, so that near ties are ties."""
    return torch.round(rewards, decimals=REWARD_DIGITS)


def group_advantages(
    rewards: Tensor, group_size: int, *, scale: str = "group", eps: float | None = None, of: Moments | None = None
) -> Tensor:
    """Advantages (N,) of each completion within its group.

    scale: group | batch | none | leave_one_out (see `SCALES`). eps, added to the std, for the first two; `of`, moments
    of the rewards over all ranks, for batch. A group of equal rewards gets exactly 0. ddof is 1 throughout.
    Raises ValueError for a bad group size, an unknown scale or an option the scale cannot use.
    """
    groups = grouped(round_rewards(rewards), group_size)
    advantages = choose(SCALES, scale, eps=eps, of=of)(groups)
    # The mean of equal floats may be off by a rounding; without this their noise would be scaled up.
    equal = _spread(groups) == 0
    return torch.where(equal | groups.isnan(), 0.0, advantages).flatten()


def _spread(groups: Tensor) -> Tensor:
    """max - min of the scorable rewards of each group, (B, 1); 0 for fewer than two."""
    scored, far = ~groups.isnan(), torch.inf
    spread = torch.where(scored, groups, -far).amax(1, True) - torch.where(scored, groups, far).amin(1, True)
    return spread.clamp(min=0)


def sum_then_normalize(
    rewards: Tensor, weights: Tensor, group_size: int, *, scale: str = "group", eps: float | None = None
) -> Tensor:
    """Several rewards (N, R), weights (R,): weighted sum of those that scored, then `group_advantages`.

    A completion that no reward could score is unscorable.
    """
    total = torch.where(rewards.isnan(), 0.0, rewards * weights).sum(-1)
    total = torch.where(rewards.isnan().all(-1), torch.nan, total)
    return group_advantages(total, group_size, scale=scale, eps=eps)


def normalize_then_sum(
    rewards: Tensor, weights: Tensor, group_size: int, *, eps: float = STD_EPS, of: Moments | None = None
) -> Tensor:
    """GDPO (2601.05242): each reward's z-score within its group, their weighted sum, its z-score over the batch.

    rewards (N, R), weights (R,) -> (N,). Keeps rewards of different spread apart, which a sum mixes. `of`: moments of
    the weighted sums over all ranks (`gdpo_sums`).
    """
    sums = gdpo_sums(rewards, weights, group_size, eps=eps)
    over = moments(sums) if of is None else of
    return torch.nan_to_num((sums - over.mean) / (over.unbiased_var.sqrt() + eps), nan=0.0)


def gdpo_sums(rewards: Tensor, weights: Tensor, group_size: int, *, eps: float = STD_EPS) -> Tensor:
    """GDPO before its last step: (N,), NaN where no reward could score."""
    columns = [group_advantages(column, group_size, eps=eps) for column in rewards.unbind(-1)]
    sums = (torch.stack(columns, -1) * weights).sum(-1)
    return torch.where(rewards.isnan().all(-1), torch.nan, sums)


def rloo_advantages(
    rewards: Tensor,
    kl: Tensor | None,
    group_size: int,
    *,
    beta: float = 0.0,
    normalize: bool = False,
    eps: float = STD_EPS,
) -> Tensor:
    """RLOO: leave one out of R = reward - beta * kl, kl (N,) the summed k1 of each completion (`kl.sequence_kl`).

    The KL is in R before the others are averaged, as in the paper (ruling D16). normalize: z-score over the batch.
    Not rounded: with the KL in it equal rewards do differ.
    """
    if beta and kl is None:
        raise ValueError(f"beta={beta} needs the KL of each completion to the reference: pass kl, or set beta=0")
    total = round_rewards(rewards) - (beta * kl if beta and kl is not None else 0.0)
    groups = grouped(total, group_size)
    advantages = torch.where(groups.isnan(), torch.nan, leave_one_out(groups)).flatten()
    if normalize:
        over = moments(advantages)
        advantages = (advantages - over.mean) / (over.unbiased_var.sqrt() + eps)
    return torch.nan_to_num(advantages, nan=0.0)


def reinforce_plus_plus(returns: Tensor, mask: Tensor, *, of: Moments | None = None) -> Tensor:
    """REINFORCE++ (2501.03262 eqs. 8-10): rewards-to-go (N, C) whitened over all response tokens of the batch.

    `returns` from `token_rewards.rewards_to_go`. `of`: their moments over all ranks.
    """
    return whiten(returns, mask, of=of)


def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor, group_size: int, *, of: Moments | None = None
) -> Tensor:
    """REINFORCE++ with a group baseline: (r - group mean) on every token, whitened over tokens. (N,), (N, C) -> (N, C).

    A group of equal rewards is not 0 afterwards: where lengths differ, the token-weighted mean is not 0.
    """
    tokens = centered_tokens(rewards, mask, group_size)
    scored = mask & ~rewards.isnan()[:, None]
    return whiten(tokens, scored, of=of)


def centered_tokens(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """r - group mean broadcast over the mask, 0 elsewhere: what `reinforce_plus_plus_baseline` whitens."""
    return torch.where(mask, group_advantages(rewards, group_size, scale="none")[:, None], 0.0)


def remax_advantages(returns: Tensor, greedy_rewards: Tensor) -> Tensor:
    """ReMax (2310.10505): reward (N,) or reward-to-go (N, C), less the score of the prompt's greedy completion (N,).

    Unscorable on either side: 0.
    """
    baseline = greedy_rewards[:, None] if returns.dim() == 2 else greedy_rewards
    return torch.nan_to_num(returns - baseline, nan=0.0)


def reward_stats(rewards: Tensor, group_size: int) -> dict[str, Tensor]:
    """reward (N,) with NaN absent; frac_reward_zero_std (N,), 1 for each sample of a group whose rewards are equal."""
    groups = grouped(round_rewards(rewards), group_size)
    flat = (_spread(groups) == 0).to(rewards.dtype).expand_as(groups).flatten()
    return {"reward": rewards.detach(), "frac_reward_zero_std": flat}


def reward_std(rewards: Tensor) -> Tensor:
    """ddof-1 std of the scorable rewards of the batch; NaN (absent) for fewer than two."""
    over = moments(rewards)
    return torch.where(over.count > 1, over.unbiased_var.sqrt(), torch.nan)
