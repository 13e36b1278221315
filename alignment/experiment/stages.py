"""A pipeline in one table and one picture: what each stage has changed on the held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from alignment.experiment.curves import COLOURS, read_curves

# What a stage is judged by, the first two that it has.
HEADLINES = ("accuracy", "accuracies", "rewards/accuracies", "reward", "loss")
# What is followed through all stages.
FOLLOWED = ("val/accuracy", "val/reward")


def write_stages(folder: Path, stages: Mapping[str, tuple[Sequence[str], Path]], full_scale: str = "") -> Path:
    """report.md and stages.png in `folder`, from each stage's summary.json and metrics.csv. stages: name -> (words,
    folder of its run). Returns the path of the report."""
    lines = ["| stage | held out | before | after | steps | minutes |", "|---|---|---|---|---|---|"]
    for name, (_, run) in stages.items():
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(name, summary)]
    parts = [f"# {folder.name}", "\n".join(lines)]
    if draw_stages(folder / "stages.png", {name: run for name, (_, run) in stages.items()}):
        parts.append("![held-out prompts through the stages](stages.png)")
    parts += [
        "## Stages",
        "\n".join(f"- **{name}** (`{run.name}/`): `{' '.join(words)}`" for name, (words, run) in stages.items()),
    ]
    if full_scale:
        parts += ["## At full scale", full_scale.strip()]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _rows(name: str, summary: Mapping[str, Any]) -> list[list[str]]:
    """The cells of a stage: what it was before and after, or what it sampled."""
    ends = [str(summary.get("steps", "")), f"{summary.get('seconds', 0) / 60:.1f}"]
    if "completions" in summary and "steps" not in summary:
        kept = f", {summary['kept']} kept" if "kept" in summary else ""
        reward = summary.get("reward")
        return [[name, f"{summary['completions']} samples{kept}", "", "" if reward is None else f"{reward:.4f}", *ends]]
    rows = []
    for metric in HEADLINES:
        before, after = summary.get(f"before/{metric}"), summary.get(f"val/{metric}")
        if before is not None and after is not None:
            rows.append(
                [name if not rows else "", metric, f"{before:.4f}", f"{after:.4f}", *(ends if not rows else ["", ""])]
            )
    return rows[:2] or [[name, "", "", "", *ends]]


def draw_stages(path: Path, runs: Mapping[str, Path]) -> bool:
    """Held-out accuracy (or reward) over the steps of all stages, one after the other. False: there is none."""
    curves = {name: read_curves(run) if (run / "metrics.csv").is_file() else {} for name, run in runs.items()}
    metric = next((m for m in FOLLOWED if any(m in found for found in curves.values())), None)
    if metric is None:
        return False
    figure = Figure(figsize=(7.5, 3.6), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    start = 0
    for colour, (name, found) in zip(COLOURS * len(curves), curves.items(), strict=False):
        steps = max((int(x[-1]) for x, _ in found.values()), default=0)
        if metric in found:
            x, y = found[metric]
            axes.plot(x + start, y, "-o", color=colour, markersize=4, linewidth=1.5, label=name)
        if start:
            axes.axvline(start, color="0.8", linewidth=0.8, zorder=0)
        start += steps
    axes.set_xlabel("optimizer step, all stages")
    axes.set_ylabel(f"held-out {metric.removeprefix('val/')}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    return True
