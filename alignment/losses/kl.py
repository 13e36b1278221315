"""KL estimators, and the terms to differentiate.

d = log p - log q of sampled tokens, positive where the policy finds the token likelier than the reference. Values after
Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); what their gradients are is in
docs/algorithms.md. d is clamped to +-20 before exp; the value is not clamped, which would zero the gradient exactly
where the KL is largest (ruling D24).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alignment.losses.reduce import masked_sum

# exp(20) = 4.9e8: far beyond any clip range, far inside float32.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """logprobs - other, clamped so that its exp is finite. A reference probability of 0 (-inf) gives the bound."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d: unbiased, any sign. The one to put into a reward: its policy gradient is that of the KL."""
    return log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased in value, but its gradient as a token loss is that of the reverse KL."""
    return 0.5 * log_ratio(logprobs, ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative; its gradient as a token loss is that of the forward KL."""
    d = log_ratio(logprobs, ref_logprobs)
    return torch.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A member of `ESTIMATORS`. Raises ValueError naming those there are."""
    if name not in ESTIMATORS:
        raise ValueError(f"KL estimator {name!r} does not exist: choose from {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def plain_k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """k2 differentiated: statewise reverse KL, for samples of the current policy."""
    return k2(logprobs, ref_logprobs)


def plain_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """k3 differentiated, GRPO's own term (2402.03300 eq. 4): pulls along the forward KL; fine near the reference."""
    return k3(logprobs, ref_logprobs)


def corrected_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """exp(log p - log p_old) * k3, nothing detached (DeepSeek-V3.2, 2512.02556; ruling D12).

    Gradient: ratio * d * grad log p, the statewise reverse KL, correct off-policy. Even at ratio 1 the product changes
    the gradient. `old_logprobs` None: the samples are the current policy's.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    return log_ratio(logprobs, old).exp() * k3(logprobs, ref_logprobs)


def straight_through_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """The value of k3 with the gradient of ratio * k2, the ratio held constant: that of `corrected_k3`."""
    value, old = k3(logprobs, ref_logprobs).detach(), logprobs if old_logprobs is None else old_logprobs
    weighted = log_ratio(logprobs, old).exp().detach() * k2(logprobs, ref_logprobs)
    return value + weighted - weighted.detach()


# Terms per token to add to a loss. k1 is not among them: its expected gradient is 0.
KL_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "k2": plain_k2,
    "k3": plain_k3,
    "k3_corrected": corrected_k3,
    "k3_straight_through": straight_through_k3,
}


def kl_loss(name: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A member of `KL_LOSSES`: f(logprobs, ref_logprobs, old_logprobs) -> (N, C). Raises ValueError for others."""
    if name == "k1":
        raise ValueError(
            "k1 as a loss has an expected gradient of 0: use it in the reward, or k3_corrected in the loss"
        )
    if name not in KL_LOSSES:
        raise ValueError(f"KL loss {name!r} does not exist: choose from {', '.join(KL_LOSSES)}")
    return KL_LOSSES[name]


def sequence_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of k1 over each completion, (N,): what the KL-regularised objective holds. Not clamped."""
    return masked_sum(logprobs - ref_logprobs, mask, -1)


def sequence_kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(sum_t d_t)^2 / 2 per completion, (N,): the exact gradient of the sequence KL, at a higher variance."""
    return 0.5 * sequence_kl(logprobs, ref_logprobs, mask) ** 2


def kl_stats(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """kl: k3 per token (N, C), unweighted. kl_seq: summed k1 per completion (N,). They differ by about the length."""
    logprobs, ref_logprobs = logprobs.detach(), ref_logprobs.detach()
    return {"kl": k3(logprobs, ref_logprobs), "kl_seq": sequence_kl(logprobs, ref_logprobs, mask)}
