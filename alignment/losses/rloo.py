"""Policy losses of whole completions: the sequence-level clip and plain REINFORCE. Advantages: `rloo_advantages`."""

from __future__ import annotations

from torch import Tensor

from alignment.losses.grpo import Result, clip_range, clip_stats, policy_log_ratio, surrogate


def sequence_clipped_loss(
    sequence_logprobs: Tensor,
    old_sequence_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> Result:
    """-min(r A, clip(r) A) with r the ratio of the summed log-probs, (N,): one clip for a whole completion.

    For long answers the ratio of sums leaves the range after the smallest change; `clipped_policy_loss` with RLOO's
    advantages clips per token instead (ruling D15).
    """
    bounds = clip_range(clip_eps, clip_eps_high)
    ratio = policy_log_ratio(sequence_logprobs, old_sequence_logprobs).exp()
    return surrogate(ratio, advantages, bounds), clip_stats(ratio, advantages, bounds)


def reinforce(sequence_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p(completion), (N,): RLOO's own estimator (2402.14740), for samples of the current policy."""
    return -advantages * sequence_logprobs
