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
