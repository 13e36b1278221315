"""Figures of a report: learning curves with bands, effects of the factors, reward against KL, a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alignment.experiment.curves import COLOURS, STYLES
from alignment.experiment.runs import Table
from alignment.experiment.settings import Comparison, label_of
from alignment.experiment.statistics import mean_interval

MAX_LINES = 12  # settings in one picture; of more, the best and the baseline are drawn, and the title says so
RESAMPLES = 2000
KL = "val/kl"


def draw_figures(comparison: Comparison, curves: Table, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Every figure the runs have data for, in every format. Returns the files."""
    figures = {
        "learning_curves": learning_curves(comparison, curves),
        "factor_effects": factor_effects(comparison),
        "frontier": frontier(comparison, curves),
        "heat_map": heat_map(comparison),
    }
    written = []
    for name, figure in figures.items():
        if figure is None:
            continue
        for suffix in formats:
            figure.savefig(folder / f"{name}.{suffix}")
            written.append(folder / f"{name}.{suffix}")
    return written


def shown(comparison: Comparison) -> list[str]:
    """Labels of the settings that are drawn, best first."""
    labels = [setting.label for setting in comparison.settings]
    if len(labels) <= MAX_LINES:
        return labels
    best = labels[: MAX_LINES - 1]
    return [*best, comparison.baseline] if comparison.baseline not in best else labels[:MAX_LINES]


def _new(width: float = 6.4, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def banded(rows: Table, metric: str, level: float = 0.95) -> Table:
    """step, mean, low, high, n: the metric over seeds at each step that at least one run has measured."""
    points = []
    for step, values in rows.dropna(subset=[metric]).groupby("step")[metric]:
        estimate = mean_interval(values.to_numpy(), level=level, num_resamples=RESAMPLES)
        points.append(
            {"step": step, "mean": estimate.value, "low": estimate.low, "high": estimate.high, "n": len(values)}
        )
    return pd.DataFrame(points)


def by_setting(comparison: Comparison, curves: Table, *needed: str) -> dict[str, Table]:
    """Rows of curves.csv that have the metrics, for each setting that is drawn."""
    if curves.empty or not set(needed) <= set(curves.columns):
        return {}
    rows = curves.dropna(subset=list(needed))
    labels = rows.apply(lambda row: label_of(row, comparison.factors), axis=1) if len(rows) else pd.Series(dtype=object)
    found = {label: rows[labels == label] for label in shown(comparison)}
    return {label: part for label, part in found.items() if len(part)}


def learning_curves(comparison: Comparison, curves: Table) -> Figure | None:
    parts = by_setting(comparison, curves, comparison.metric)
    if not parts:
        return None
    figure, axes = _new()
    for (colour, dash, marker), (label, rows) in zip(STYLES * len(parts), parts.items(), strict=False):
        line = banded(rows, comparison.metric, comparison.level)
        drawn: Any = {"color": colour, "linestyle": dash, "marker": marker, "label": label}
        axes.plot(line["step"], line["mean"], linewidth=1.6, markersize=3, **drawn)
        axes.fill_between(line["step"], line["low"], line["high"], color=colour, alpha=0.15, linewidth=0)
    _finish(
        axes,
        "optimizer step",
        comparison.metric,
        _title(f"Mean over seeds, {100 * comparison.level:g}% interval", comparison),
    )
    return figure


def _title(text: str, comparison: Comparison) -> str:
    num, total = len(shown(comparison)), len(comparison.settings)
    return text if num == total else f"{text}; the best {num} of {total} settings"


def _finish(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, frameon=False)


def factor_effects(comparison: Comparison) -> Figure | None:
    """Mean of all runs at each level of each factor, whatever the other factors are."""
    if not comparison.factors:
        return None
    runs = [(setting.levels, value) for setting in comparison.settings for value in setting.by_seed.values()]
    figure = Figure(figsize=(3.4 * len(comparison.factors) + 0.6, 3.4), layout="constrained", dpi=150)
    for place, factor in enumerate(comparison.factors, 1):
        axes = figure.add_subplot(1, len(comparison.factors), place)
        levels = sort_levels({levels[factor] for levels, _ in runs if factor in levels})
        estimates = [
            mean_interval([v for at, v in runs if at.get(factor) == here], level=comparison.level) for here in levels
        ]
        means = np.array([estimate.value for estimate in estimates])
        errors = np.array([[e.value - e.low, e.high - e.value] for e in estimates]).T
        axes.errorbar(range(len(levels)), means, np.nan_to_num(errors), color=COLOURS[0], fmt="o-", capsize=3)
        axes.set_xticks(range(len(levels)), [_tick(level) for level in levels], fontsize=8)
        axes.set_xlabel(factor)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.set_ylabel(comparison.metric)
    figure.suptitle(f"Mean over all runs with that level, {100 * comparison.level:g}% interval", fontsize=10)
    return figure


def sort_levels(levels: set[Any]) -> list[Any]:
    """Numbers by size before words by alphabet."""
    return sorted(
        levels, key=lambda level: (isinstance(level, str), level if not isinstance(level, str) else 0, str(level))
    )


def _tick(level: Any) -> str:
    return f"{level:g}" if isinstance(level, float) else str(level)


def frontier(comparison: Comparison, curves: Table) -> Figure | None:
    """What is gained for how far the policy has gone from its reference: a path per setting, a point per evaluation."""
    if comparison.metric == KL:
        return None
    parts = by_setting(comparison, curves, KL, comparison.metric)
    if not parts:
        return None
    figure, axes = _new()
    for (colour, dash, marker), (label, rows) in zip(STYLES * len(parts), parts.items(), strict=False):
        path = rows.groupby("step")[[KL, comparison.metric]].mean()
        axes.plot(path[KL], path[comparison.metric], color=colour, linestyle=dash, linewidth=1, alpha=0.6)
        axes.scatter(path[KL], path[comparison.metric], color=colour, marker=marker, s=14, label=label)
    _finish(
        axes, "KL to the reference (nats per completion)", comparison.metric, _title("Means over seeds", comparison)
    )
    return figure


def heat_map(comparison: Comparison) -> Figure | None:
    """Mean over seeds and over all other factors, for the two factors with the most levels."""
    levels = {name: {s.levels[name] for s in comparison.settings if name in s.levels} for name in comparison.factors}
    names = sorted((name for name in levels if len(levels[name]) > 1), key=lambda name: -len(levels[name]))[:2]
    if len(names) < 2:
        return None
    columns, rows = sort_levels(levels[names[0]]), sort_levels(levels[names[1]])
    grid = np.full((len(rows), len(columns)), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            here = [
                s for s in comparison.settings if s.levels.get(names[1]) == row and s.levels.get(names[0]) == column
            ]
            values = [value for setting in here for value in setting.by_seed.values()]
            grid[i, j] = np.mean(values) if values else np.nan
    figure = Figure(figsize=(1.1 * len(columns) + 2.4, 0.8 * len(rows) + 1.8), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="viridis", aspect="auto")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (i, j), value in np.ndenumerate(grid):
        if not np.isnan(value):
            axes.text(j, i, f"{value:.3g}", ha="center", va="center", color="white" if value < middle else "black")
    axes.set_xticks(range(len(columns)), [_tick(level) for level in columns])
    axes.set_yticks(range(len(rows)), [_tick(level) for level in rows])
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    figure.colorbar(image, label=comparison.metric)
    axes.set_title("Mean over seeds and other factors", fontsize=10)
    return figure
