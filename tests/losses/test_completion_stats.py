"""Lengths of completions."""

from __future__ import annotations

import torch

from alignment.losses.completion_stats import completion_stats, length_range


def test_lengths_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    stats = completion_stats(mask, torch.tensor([False, True]))
    assert stats["length"].tolist() == [3, 1]
    assert stats["finished_length"].isnan().tolist() == [True, False]
    assert stats["finished_length"][1] == 1
    assert stats["clipped"].tolist() == [1, 0]
    assert length_range(mask) == (1, 3)
