"""One picture of a run: curves.png, drawn from metrics.csv."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alignment.errors import UserError
from alignment.experiment.record import MetricsFile

# (title, what the vertical axis shows, the metrics in it). A panel without any of its metrics is left out.
PANELS = (
    ("Reward", "mean reward", r"(rollout|train|val)/reward"),
    ("Accuracy", "share right", r"(rollout|train|val)/accuracy(_pass@\d+)?"),
    ("Preference accuracy", "share of pairs", r"((train|val)/)?(rewards/)?accuracies"),
    ("Implicit rewards", "beta * log-ratio", r"((train|val)/)?(rewards/)?(chosen|rejected|margins?)"),
    ("KL to the reference", "nats", r"(rollout|train|val)/kl"),
    ("Entropy", "nats per token", r"(rollout|train|val)/entropy"),
    ("Completion length", "tokens", r"(rollout|val)/length"),
    ("Loss", "loss", r"(train|val)/loss"),
)
SHARES = {"Accuracy", "Preference accuracy"}
# Okabe and Ito's palette, told apart by colour-blind readers too. Held-out metrics are dashed, with a marker each.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# (colour, line, marker) of many curves in one panel: where the colours begin again, line and marker are others.
STYLES = tuple((c, *rest) for rest in (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")) for c in COLOURS)
SMOOTHED_FROM = 60  # points; a longer curve of training is drawn pale, with its moving mean on top
NUM_COLUMNS = 3


def draw_curves(folder: str | Path) -> Path:
    """Draw whichever of reward, accuracy, KL, entropy, length and loss metrics.csv has, over optimizer steps.

    Raises UserError where it has none of them.
    """
    folder = Path(folder)
    curves = read_curves(folder)
    panels = [(title, label, _chosen(pattern, curves)) for title, label, pattern in PANELS]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise UserError(f"{folder / 'metrics.csv'} has nothing to draw: it has {sorted(curves) or 'no rows'}")
    columns = min(NUM_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows + 0.4), layout="constrained", dpi=120)
    figure.suptitle("/".join(folder.absolute().parts[-2:]), fontsize=11)
    for place, (title, label, names) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        _draw_panel(axes, title, label, {name: curves[name] for name in names})
    path = folder / "curves.png"
    figure.savefig(path)
    return path


def read_curves(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Metric -> (steps, values), both (n,), in order of steps; values that are not finite are left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in MetricsFile(folder).read():
        for name, value in row.items():
            if name not in MetricsFile.KEYS and math.isfinite(value):
                points.setdefault(name, []).append((row["step"], value))
    return {name: _arrays(sorted(pairs)) for name, pairs in points.items()}


def _arrays(pairs: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = zip(*pairs, strict=True)
    return np.asarray(steps), np.asarray(values)


def _chosen(pattern: str, curves: dict[str, Any]) -> list[str]:
    """Training first, then held out: their colours are the same in every panel."""
    return sorted((name for name in curves if re.fullmatch(pattern, name)), key=lambda name: name.startswith("val/"))


def _draw_panel(axes: Axes, title: str, label: str, curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for colour, (name, (steps, values)) in zip(COLOURS * len(curves), curves.items(), strict=False):
        _draw_curve(axes, name, colour, steps, values)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if title in SHARES:
        axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=7, frameon=False)


def _draw_curve(axes: Axes, name: str, colour: str, steps: np.ndarray, values: np.ndarray) -> None:
    if name.startswith("val/") or len(steps) == 1:
        axes.plot(steps, values, "--o", color=colour, markersize=3.5, linewidth=1.2, label=name, zorder=3)
    elif len(steps) < SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.4, label=name)
    else:
        width = max(5, len(values) // 30) | 1  # odd, so that the mean is centred
        axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(steps, moving_mean(values, width), color=colour, linewidth=1.6, label=f"{name} (mean of {width})")


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` (odd) points, over fewer at both ends. (n,) -> (n,)"""
    window = np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
