"""report.html: one file that needs no network: tables, curves with hover, and two runs' completions side by side."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from alignment.experiment.curves import PANELS, read_curves
from alignment.experiment.record import Samples, plain
from alignment.experiment.runs import BROKEN, Run, level, short_names
from alignment.experiment.settings import Comparison, label_of
from alignment.experiment.tables import caption, cells

TEMPLATE = Path(__file__).with_name("page.html")
MAX_POINTS = 200  # of one curve
MAX_TEXT = 4000  # characters of a prompt or a completion
DRAWN = re.compile("|".join(f"(?:{pattern})" for _, _, pattern in PANELS) + "|val/.*")


def write_page(comparison: Comparison, runs: list[Run], path: Path, *, title: str, num_samples: int) -> Path:
    """num_samples: completions kept of each run and each of its first, middle and last evaluations or rollouts."""
    header, rows = cells(comparison)
    run_header, run_rows = _run_rows(comparison)
    data = {
        "title": title,
        "metric": comparison.metric,
        "caption": caption(comparison),
        "caution": comparison.caution,
        "header": header,
        "rows": rows,
        "run_header": run_header,
        "run_rows": run_rows,
        "runs": [_run(run, comparison, num_samples) for run in runs],
    }
    # In a script element only "</" could end it; JSON may write the slash as \/.
    text = json.dumps(plain(data, "page", finite=True), ensure_ascii=False).replace("</", "<\\/")
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", text), encoding="utf-8", errors="replace")
    return path


def _run_rows(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    columns = ["run", "status", "reason", *comparison.factors, "seed", comparison.metric]
    columns += [name for name in ("steps", "seconds", "peak_rss_gib") if name in comparison.table]
    frame = comparison.table.reindex(columns=columns).astype(object)
    return columns, frame.where(frame.notna(), None).to_numpy().tolist()


def _run(run: Run, comparison: Comparison, num_samples: int) -> dict[str, Any]:
    names = short_names(comparison.keys)
    row = {names[key]: level(run.config[key]) if key in run.config else None for key in comparison.keys}
    known = run.status != BROKEN
    return {
        "name": run.folder.name,
        "label": label_of(row, comparison.factors),
        "seed": run.seed,
        "curves": _curves(run.folder) if known else None,
        "samples": _samples(run.folder, num_samples) if known else [],
    }


def _curves(folder: Path) -> dict[str, list[list[float]]]:
    found = {}
    for name, (steps, values) in read_curves(folder).items():
        if DRAWN.fullmatch(name):
            places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).astype(int))
            found[name] = [[int(steps[i]), float(values[i])] for i in places]
    return found


def _samples(folder: Path, count: int) -> list[dict[str, Any]]:
    """Of each phase's first, middle and last step, `count` completions spread evenly. The file is read line by line."""
    sizes: dict[tuple[str, int], int] = {}
    for record in Samples(folder).read():
        key = (record["phase"], record["step"])
        sizes[key] = sizes.get(key, 0) + 1
    steps = {phase: [step for name, step in sizes if name == phase] for phase, _ in sizes}
    wanted = {(phase, known[i]) for phase, known in steps.items() for i in {0, len(known) // 2, len(known) - 1}}
    kept, seen = [], dict.fromkeys(wanted, 0)
    for record in Samples(folder).read():
        key = (record["phase"], record["step"])
        if key in wanted:
            stride = max(1, sizes[key] // count) if count else sizes[key] + 1
            if seen[key] % stride == 0 and seen[key] // stride < count:
                kept.append(_short(record))
            seen[key] += 1
    return kept


def _short(record: dict[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        prompt = [{"role": turn.get("role"), "content": _cut(turn.get("content"))} for turn in prompt]
    kept = {name: record.get(name) for name in ("step", "phase", "answer", "reward", "parts")}
    return kept | {"prompt": _cut(prompt), "completion": _cut(record.get("completion"))}


def _cut(text: Any) -> Any:
    return "".join(itertools.islice(text, MAX_TEXT)) if isinstance(text, str) else text
