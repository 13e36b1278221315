"""Lengths of completions."""

from __future__ import annotations

import torch

from alignment.losses.completion_stats import completion_stats, length_range, repetition


def test_lengths_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    stats = completion_stats(mask, torch.tensor([False, True]))
    assert stats["length"].tolist() == [3, 1]
    assert stats["finished_length"].isnan().tolist() == [True, False]
    assert stats["finished_length"][1] == 1
    assert stats["clipped"].tolist() == [1, 0]
    assert length_range(mask) == (1, 3)


def test_repetition_is_the_share_of_pieces_that_were_there_before() -> None:
    """1212121 has pieces 1212 2121 1212 2121, two of four again; 12345 none; 123 is too short; 11111 one of two."""
    rows = [[1, 2, 1, 2, 1, 2, 1], [1, 2, 3, 4, 5, 0, 0], [1, 2, 3, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    lengths = torch.tensor([7, 5, 3, 5])
    mask = torch.arange(7) < lengths[:, None]
    found = repetition(torch.tensor(rows), mask)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0, torch.nan, 0.5]), equal_nan=True)
