"""Policy losses of whole completions: the sequence-level clip and plain REINFORCE. Advantages: `rloo_advantages`."""

from __future__ import annotations

from torch import Tensor

from alignment.losses.grpo import Result, clip_range, clip_stats, per_token, policy_log_ratio, surrogate
from alignment.losses.reduce import sequence_logprobs


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


def sequence_clipped_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> Result:
    """`sequence_clipped_loss` of tokens (N, C): one value per completion, repeated on its tokens.

    seq_mean_token_mean is then the mean over completions. Advantages (N,), since tokens share one value.
    """
    if advantages.dim() != 1:
        raise ValueError(f"sequence takes one advantage per completion, got shape {tuple(advantages.shape)}")
    old = None if old_logprobs is None else sequence_logprobs(old_logprobs, mask)
    now = sequence_logprobs(logprobs, mask)
    values, stats = sequence_clipped_loss(now, old, advantages, clip_eps=clip_eps, clip_eps_high=clip_eps_high)
    return per_token(values).expand_as(logprobs), {k: per_token(v).expand_as(logprobs) for k, v in stats.items()}


def reinforce_tokens(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor) -> Result:
    """-A log p per token (N, C); summed over a completion's tokens it is `reinforce`, with advantages (N,) or (N, C).

    For samples of the current policy: `old_logprobs` is not read.
    """
    return -per_token(advantages) * logprobs, {}
