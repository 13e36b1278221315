"""`task=report`: what many runs say together: tables, figures and one HTML page."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, Literal

from alignment.errors import UserError
from alignment.experiment.figures import draw_figures
from alignment.experiment.page import write_page
from alignment.experiment.record import plain
from alignment.experiment.runs import DONE, curve_table, find_runs
from alignment.experiment.settings import Comparison, compare
from alignment.experiment.tables import markdown, write_tables

log = logging.getLogger("alignment")


def run(
    cfg: dict[str, Any],
    *,
    metric: str | None,
    baseline: str | None,
    level: float,
    formats: list[Literal["png", "svg", "pdf"]],
    num_samples: int,
) -> dict[str, Any]:
    """Compare the runs below `runs`; everything is written into the report's own folder."""
    if not 0 < level < 1:
        raise UserError(f"task.level: {level} is no share between 0 and 1: type task.level=0.95")
    folder = Path(cfg["output_dir"])
    places = [cfg["runs"]] if isinstance(cfg["runs"], str) else cfg["runs"]
    runs = find_runs(places)
    comparison = compare(runs, metric=metric, baseline=baseline, level=level)
    done = [one for one in runs if one.status == DONE]
    curves = curve_table(done, comparison.keys)
    written = write_tables(comparison, curves, folder)
    written += draw_figures(comparison, curves, folder, formats)
    title = f"{comparison.metric}: {len(comparison.settings)} settings, {len(done)} runs"
    written.append(write_page(comparison, runs, folder / "report.html", title=title, num_samples=num_samples))
    tell(comparison, folder)
    (folder / "report.json").write_text(json.dumps(plain(summary(comparison), "report", finite=True), indent=2) + "\n")
    return summary(comparison) | {"output_dir": str(folder)}


def tell(comparison: Comparison, folder: Path) -> None:
    """The table, and every run that is not in it, in the log."""
    log.info("\n%s", markdown(comparison))
    for _, row in comparison.left_out.iterrows():
        log.warning("%s is left out: %s (%s)", row["run"], row["status"], row["reason"])
    log.info("tables, figures and report.html are in %s", folder)


def summary(comparison: Comparison) -> dict[str, Any]:
    best = comparison.settings[0]
    found = {"metric": comparison.metric, "best": best.label, "mean": best.estimate.value}
    found |= {"low": _known(best.estimate.low), "high": _known(best.estimate.high), "baseline": comparison.baseline}
    return found | {
        "num_runs": len(comparison.table),
        "num_left_out": len(comparison.left_out),
        "num_settings": len(comparison.settings),
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
