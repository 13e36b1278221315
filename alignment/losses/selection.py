"""Choosing among n samples of a prompt: best of n, RAFT, rejection sampling, pass@k."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ranked_indices(rewards: Tensor) -> Tensor:
    """(B, n) rewards -> (B, n) indices, best first; equals in their order, unscorable (NaN) last."""
    known = torch.where(rewards.isnan(), -torch.inf, rewards)
    return torch.sort(known, stable=True, dim=-1, descending=True).indices


def top_k(rewards: Tensor, k: int, *, threshold: float = -math.inf) -> tuple[Tensor, Tensor]:
    """RAFT (2304.06767): the k best of n of each prompt -> indices (B, k), which of them are kept (B, k) bool.

    k = 1 is best-of-n. Dropped: unscorable samples, and all of a prompt whose best reward is below `threshold`.
    """
    if not 1 <= k <= rewards.shape[-1]:
        raise ValueError(f"cannot keep the best {k} of {rewards.shape[-1]} samples: choose k between 1 and the number")
    indices = ranked_indices(rewards)[..., :k]
    chosen = rewards.gather(-1, indices)
    good = chosen[..., :1] >= threshold
    return indices, ~chosen.isnan() & good


def selected_mask(mask: Tensor, selected: Tensor) -> Tensor:
    """Loss mask (N, C) of the samples kept (N,) bool: what RAFT's likelihood is averaged over."""
    return mask & selected[:, None]


def acceptance(rewards: Tensor, *, beta: float) -> Tensor:
    """RSO (2309.06657): probability exp((r - max r) / beta) to accept each sample, (B, n).

    The accepted are distributed as proposal * exp(r / beta). beta -> 0 is best-of-n; equal rewards accept all. An
    unscorable sample is never accepted.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    known = torch.where(rewards.isnan(), -torch.inf, rewards)
    best = known.amax(-1, keepdim=True)
    return torch.where(known == best, 1.0, ((known - best) / beta).exp()) * ~rewards.isnan()


def accept(rewards: Tensor, *, beta: float, generator: torch.Generator | None = None) -> Tensor:
    """One draw of each acceptance, (B, n) bool; a prompt's best sample is always in."""
    draws = torch.rand(rewards.shape, generator=generator, device=rewards.device)
    return draws < acceptance(rewards, beta=beta)


def best_of_n_distribution(probs: Tensor, rewards: Tensor, n: int) -> Tensor:
    """Distribution of the best of n draws over (M,) outcomes with distinct rewards, in the outcomes' order."""
    order = rewards.argsort()
    below = probs[order].cumsum(0) ** n
    each = torch.cat([below[:1], below.diff()])
    return torch.empty_like(each).scatter(0, order, each)


def best_of_n_kl_bound(n: int) -> float:
    """log n - (n - 1) / n >= KL(best of n || policy), in nats (2401.01879); exact for ever less probable outcomes."""
    return math.log(n) - (n - 1) / n


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (2107.03374 eq. 1); 1 if every set of k holds a correct one."""
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct in {num_samples} samples: needs k, correct <= samples")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_rows(correct: Tensor, k: int) -> Tensor:
    """(B, n) bool -> (B,) float32 unbiased pass@k of each prompt."""
    n = correct.shape[-1]
    table = torch.tensor([pass_at_k(n, c, k) for c in range(n + 1)], device=correct.device)
    return table[correct.sum(-1)]
