"""Rewards per token: the score on the last token, a KL penalty on each, sums of what is to come.

scores (N,); logprobs (the sampling policy's), ref_logprobs (N, C); mask (N, C) bool, the response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.losses.kl import estimator
from alignment.losses.reduce import masked_sum, whiten
from alignment.losses.sampling import penalize_unfinished


def last_token(mask: Tensor) -> Tensor:
    """Index of the last response token of each row, (N,); 0 for a row without any: ask `mask.any(-1)`."""
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, positions, 0).amax(-1)


def place_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """(N,) -> (N, C): the score at the last response token, EOS where there is one (ruling D5), 0 elsewhere.

    A row without tokens carries nothing. Raises ValueError for a NaN score of a row that has tokens.
    """
    used = mask.any(-1)
    lost = (used & scores.isnan()).nonzero().flatten().tolist()
    if lost:
        raise ValueError(
            f"completions {lost} have no score (NaN): a critic needs one for each. Give the reward a value for what it "
            "cannot score, or take these rows out of the loss mask"
        )
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    return rewards.scatter(1, last_token(mask)[:, None], torch.where(used, scores, 0.0)[:, None])


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    *,
    beta: float,
    finished: Tensor | None = None,
    missing_eos_penalty: float = 0.0,
    reward_clip: float | None = None,
    kl: str = "k1",
    whiten_rewards: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's rewards (N, C): score at the end, minus beta * KL on every token. Detached.

    In this order: missing_eos_penalty off the score of rows that are not `finished`, scores clipped to +-reward_clip,
    the KL penalty, the placed score, whitening without shifting the mean. kl: k1 is the one whose policy gradient is
    that of the KL-regularised objective; k2 and k3 are biased. beta=0 needs no reference.
    Statistics (N,): scores (raw), kl_seq (summed k1), non_score_reward (summed penalty), rlhf_reward (their sum).
    """
    if beta and ref_logprobs is None:
        raise ValueError(f"beta={beta} needs the reference's log-probs: pass ref_logprobs, or set beta=0")
    if missing_eos_penalty and finished is None:
        raise ValueError("missing_eos_penalty needs to know which completions finished: pass finished")
    final = scores.detach()
    if missing_eos_penalty and finished is not None:
        final = penalize_unfinished(final, finished, penalty=missing_eos_penalty)
    final = final if reward_clip is None else final.clamp(-reward_clip, reward_clip)
    penalty, kl_seq = torch.zeros_like(logprobs), torch.zeros_like(logprobs[:, 0])
    if ref_logprobs is not None:
        penalty = torch.where(mask, -beta * estimator(kl)(logprobs, ref_logprobs), 0.0).detach()
        kl_seq = masked_sum(logprobs - ref_logprobs, mask, -1).detach()
    rewards = place_scores(final, mask) + penalty
    stats = {"scores": scores.detach(), "kl_seq": kl_seq, "non_score_reward": penalty.sum(-1)}
    stats["rlhf_reward"] = final + stats["non_score_reward"]
    return (whiten(rewards, mask, shift_mean=False) if whiten_rewards else rewards), stats


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """sum over s >= t of gamma^(s - t) r_s, (N, C), counting response tokens only: a hole is no time step."""
    to_go, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        to_go[:, t] = torch.where(mask[:, t], running, 0.0)
    return to_go
