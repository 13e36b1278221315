"""The picture of a data report, read back from the figure that is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from alignment.experiment.lengths import draw_lengths


def test_every_part_of_every_set_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bins = {"prompt": {"width": 2, "counts": [1, 5]}, "chosen": {"width": 10, "counts": [0, 3, 4]}}
    medians = {name: {"median": 3} for name in bins}
    numbers = {"examples": 7, "histogram": bins, "tokens": medians}
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    path = draw_lengths({"sets": {"train": numbers, "heldout_prompts": numbers}}, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = saved[0].axes
    assert [one.get_title() for one in axes] == ["train: 7 examples", "heldout prompts: 7 examples"]
    lines = [patch for patch in axes[0].patches if isinstance(patch, StepPatch) and not patch.get_fill()]
    np.testing.assert_array_equal(lines[0].get_data().edges, [0, 2, 4])
    np.testing.assert_array_equal(lines[1].get_data().values, [0, 3, 4])
    legend = axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["prompt (median 3)", "chosen (median 3)"]
