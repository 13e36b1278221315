"""One picture of a run's data: data_report.png, how long prompts and completions are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alignment.experiment.curves import COLOURS


def draw_lengths(report: Mapping[str, Any], folder: str | Path) -> Path:
    """A panel for each set of examples of a data report, with the lengths in tokens of each part of an example."""
    folder = Path(folder)
    sets = report["sets"]
    figure = Figure(figsize=(4.6 * len(sets), 3.7), layout="constrained", dpi=120)
    figure.suptitle("/".join(folder.absolute().parts[-2:]), fontsize=11)
    for place, (name, numbers) in enumerate(sets.items(), 1):
        title = f"{name.replace('_', ' ')}: {numbers['examples']} examples"
        _draw_panel(figure.add_subplot(1, len(sets), place), title, numbers)
    path = folder / "data_report.png"
    figure.savefig(path)
    return path


def _draw_panel(axes: Axes, title: str, numbers: Mapping[str, Any]) -> None:
    for colour, (part, bins) in zip(COLOURS, numbers["histogram"].items(), strict=False):
        edges = np.arange(len(bins["counts"]) + 1) * bins["width"]
        label = f"{part} (median {numbers['tokens'][part]['median']})"
        axes.stairs(bins["counts"], edges, color=colour, linewidth=1.4, label=label)
        axes.stairs(bins["counts"], edges, color=colour, alpha=0.15, fill=True)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("how many", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
