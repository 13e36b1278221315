"""What completions look like: lengths, and how many were cut off."""

from __future__ import annotations

import torch
from torch import Tensor


def completion_stats(mask: Tensor, finished: Tensor) -> dict[str, Tensor]:
    """(N,): length in tokens; finished_length, NaN where cut off; clipped, 1 where cut off. mask (N, C) bool."""
    lengths = mask.sum(-1).float()
    return {
        "length": lengths,
        "finished_length": torch.where(finished, lengths, torch.nan),
        "clipped": (~finished).float(),
    }


def length_range(mask: Tensor) -> tuple[int, int]:
    """Shortest and longest completion, in tokens."""
    lengths = mask.sum(-1)
    return int(lengths.min()), int(lengths.max())


def repetition(ids: Tensor, mask: Tensor, *, size: int = 4) -> Tensor:
    """Share of each completion's pieces of `size` tokens that occur before in it, (N,); NaN for shorter completions.

    0 = nothing twice. ids (N, C) int64, mask (N, C) bool, True up to the end.
    """
    shares = []
    for row, length in zip(ids, mask.sum(-1).tolist(), strict=True):
        pieces = row[:length].unfold(0, size, 1) if length >= size else row[:0]
        repeated = len(pieces) - len(pieces.unique(dim=0)) if len(pieces) else 0
        shares.append(repeated / len(pieces) if len(pieces) else torch.nan)
    return torch.tensor(shares, dtype=torch.float32, device=ids.device)
