"""TPO: a preference between two answers beside the likelihood of a third, the gold one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from alignment.losses.dpo import Pairs, pairs_from_tokens, sigmoid
from alignment.losses.simpo import simpo

# TPO (2405.16681): the pair's loss + alpha * NLL of the gold answer, a token mean that the caller adds. tpo uses sums;
# tpo_l averages with a margin.
TPO_LOSSES: dict[str, Callable[..., Tensor]] = {"tpo": sigmoid, "tpo_l": simpo}


def split_triples(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Pairs]:
    """(3B, C) rows gold, chosen, rejected in turn -> gold log-probs (B, C), their mask, and the pairs.

    Raises ValueError where the rows are not whole triples.
    """
    if len(logprobs) % 3:
        raise ValueError(f"{len(logprobs)} rows are not triples of gold, chosen and rejected")
    rows, masks = logprobs.unflatten(0, (-1, 3)), mask.unflatten(0, (-1, 3))
    pairs = pairs_from_tokens(rows[:, 1:].flatten(0, 1), None, masks[:, 1:].flatten(0, 1))
    return rows[:, 0], masks[:, 0], pairs
