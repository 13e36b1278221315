"""Masked sums and means, the ways a policy loss is averaged, moments that merge, and whitening.

Masks are bool (N, C). Values outside the mask are dropped by `torch.where`, not multiplied by 0, so that a NaN or an
infinity in the padding cannot reach a sum (NaN * 0 is NaN). An empty mask gives exactly 0 with a gradient path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask`, over everything or over one dimension. `mask` broadcasts."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask`; 0 where nothing is."""
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    values, mask = values.expand(shape), mask.expand(shape)
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of each whole completion: (N, C) -> (N,)."""
    return masked_sum(logprobs, mask, -1)


def average_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean log-prob per token of each completion: (N, C) -> (N,). An empty completion gives 0."""
    return masked_mean(logprobs, mask, -1)


class Reduction(NamedTuple):
    """One way to average a policy loss.

    The loss of an optimizer step is the sum of `total` over its microbatches and ranks, divided by the sum of `count`
    over the same. Dividing before adding up (a mean of means) would weigh tokens by the microbatch they fell into.
    `total(values, mask, max_tokens)` has a gradient; `count(mask)` has none.
    """

    total: Callable[[Tensor, Tensor, int | None], Tensor]
    count: Callable[[Tensor], Tensor]


def _row_means(values: Tensor, mask: Tensor, max_tokens: int | None) -> Tensor:
    return masked_mean(values, mask, -1).sum()


def _sum(values: Tensor, mask: Tensor, max_tokens: int | None) -> Tensor:
    return masked_sum(values, mask)


def _microbatch_mean(values: Tensor, mask: Tensor, max_tokens: int | None) -> Tensor:
    return masked_mean(values, mask)


def _sum_per_max_token(values: Tensor, mask: Tensor, max_tokens: int | None) -> Tensor:
    if not max_tokens:
        raise ValueError("reduction 'constant' divides by max_tokens, the longest completion allowed: pass it")
    return masked_sum(values, mask) / max_tokens


def _num_tokens(mask: Tensor) -> Tensor:
    return mask.sum()


def _num_used_rows(mask: Tensor) -> Tensor:
    return mask.any(-1).sum()


def _num_rows(mask: Tensor) -> Tensor:
    return mask.new_full((), len(mask), dtype=torch.long)


def _one(mask: Tensor) -> Tensor:
    return mask.new_ones((), dtype=torch.long)


# | name | formula | used by |
# | token_mean | sum / tokens of the step | SFT, DAPO, CISPO, VESPO, PPO |
# | microbatch_token_mean | sum / tokens of the microbatch, then a mean over microbatches | BNPO; depends on the split |
# | seq_mean_token_mean | mean over non-empty rows of row means | GRPO, GSPO, SAPO, GMPO |
# | seq_mean_token_sum | mean over non-empty rows of row sums | REINFORCE |
# | row_mean_token_sum | mean over all rows, empty ones included, of row sums | LUSPO |
# | constant | sum / (rows * max_tokens) | Dr. GRPO |
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": Reduction(_sum, _num_tokens),
    "microbatch_token_mean": Reduction(_microbatch_mean, _one),
    "seq_mean_token_mean": Reduction(_row_means, _num_used_rows),
    "seq_mean_token_sum": Reduction(_sum, _num_used_rows),
    "row_mean_token_sum": Reduction(_sum, _num_rows),
    "constant": Reduction(_sum_per_max_token, _num_rows),
}


def reduction(name: str) -> Reduction:
    """A member of `REDUCTIONS`. Raises ValueError naming those there are."""
    if name not in REDUCTIONS:
        raise ValueError(f"reduction {name!r} does not exist: choose from {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name]


def step_count(mask: Tensor, name: str) -> Tensor:
    """What this microbatch adds to the denominator of reduction `name`: sum it over the optimizer step and all ranks.

    Rows without a loss token are not counted in means over sequences (ruling D11), so that filtering completions does
    not shrink the step without a word.
    """
    return reduction(name).count(mask)


def reduce_loss(
    values: Tensor,
    mask: Tensor,
    name: str = "token_mean",
    *,
    max_tokens: int | None = None,
    count: Tensor | float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Scalar loss of (N, C) values; a microbatch's share of the step where `count` is the whole step's denominator.

    max_tokens: Dr. GRPO's constant, the longest completion allowed; never the padded width, which varies.
    count: sum of `step_count` over all microbatches and ranks of the optimizer step; None: this batch is the step.
    scale: accumulate_grad_batches * world_size, which undoes the trainer's and DDP's own averaging.
    Raises ValueError for an unknown name, for 'constant' without max_tokens and for max_tokens with any other.
    """
    if max_tokens is not None and name != "constant":
        raise ValueError(f"max_tokens is the divisor of reduction 'constant': {name!r} cannot use it")
    how = reduction(name)
    denominator = how.count(mask) if count is None else torch.as_tensor(count, device=values.device)
    return how.total(values, mask, max_tokens) * scale / denominator.clamp(min=1)


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations: they merge exactly (parallel Welford, Chan et al. 1979).

    Each rank makes its own, all gather these three numbers, and everyone merges: the statistics are those of one
    process. As a running estimate, merge the new batch into the old.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @property
    def var(self) -> Tensor:
        """Population variance; 0 for an empty set."""
        return self.squares / self.count.clamp(min=1)

    @property
    def unbiased_var(self) -> Tensor:
        """Sample variance (ddof 1); 0 for fewer than two values."""
        return self.squares / (self.count - 1).clamp(min=1)

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        gap, share = other.mean - self.mean, other.count / count.clamp(min=1)
        squares = self.squares + other.squares + gap**2 * self.count * share
        return Moments(count, self.mean + gap * share, squares)


def moments(values: Tensor, mask: Tensor | None = None) -> Moments:
    """Moments of `values` where `mask` (default: where not NaN). Detached."""
    values = values.detach()
    mask = ~values.isnan() if mask is None else mask
    mean = masked_mean(values, mask)
    return Moments(mask.sum().to(values.dtype), mean, masked_sum((values - mean) ** 2, mask))


def no_moments(like: Tensor) -> Moments:
    """The moments of nothing, in the dtype and on the device of `like`: where a running estimate starts."""
    return Moments(*(like.new_zeros(()) for _ in range(3)))


def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, of: Moments | None = None, eps: float = 1e-8
) -> Tensor:
    """(values - mean) / sqrt(var + eps) with the mask's mean and ddof-1 variance (ruling D6); 0 outside the mask.

    shift_mean=False adds the mean back after scaling. `of`: moments of the whole batch over all ranks; without it the
    statistics are local, which changes the objective with the number of ranks. Fewer than two values: all 0.
    """
    over = moments(values, mask) if of is None else of
    white = (values - over.mean) * torch.rsqrt(over.unbiased_var + eps)
    white = white if shift_mean else white + over.mean
    return torch.where(mask & (over.count > 1), white, torch.zeros_like(white))
