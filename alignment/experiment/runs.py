"""Reading many runs: what each was asked for, how it ended, what it measured, and in what they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from alignment.errors import UserError
from alignment.experiment.record import MetricsFile

# Keys that tell runs apart without being a choice of the experiment.
NO_FACTORS = ("seed", "output_dir", "resume", "debug", "runs", "logger", "task", "checkpoint", "hydra")
# A pandas.DataFrame; by its own annotations every subscript of one could be anything, so checkers are told nothing.
Table = Any
DONE, UNFINISHED, FAILED, BROKEN = "done", "unfinished", "failed", "broken"


@dataclass
class Run:
    """One run's folder. `status` is one of the four above, `reason` says more where it is not `done`."""

    folder: Path
    status: str
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # by dotted key
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.csv. Read when asked for: most of a report needs the summary alone."""
        return MetricsFile(self.folder).read()


def find_runs(places: Iterable[str | Path]) -> list[Run]:
    """Every run at or below the places, in the order of their paths (2 before 10). Broken ones are among them.

    Raises UserError for a place that is not there, and where no run is found.
    """
    folders: dict[Path, None] = {}
    places = [Path(place).expanduser() for place in places]
    for place in places:
        if not place.is_dir():
            raise UserError(f"runs: there is no folder {place}: type runs=<folder of a run or of a sweep>")
        folders |= dict.fromkeys(sorted(_run_folders(place), key=_natural))
    runs = [run for folder in folders if (run := read_run(folder)) is not None]
    if not runs:
        raise UserError(f"runs: no run is in {', '.join(map(str, places))}: type runs=<folder of a run or of a sweep>")
    return runs


def _run_folders(place: Path) -> Iterator[Path]:
    return (path.parent for path in place.rglob("config.yaml"))


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.parts]


def read_run(folder: Path) -> Run | None:
    """One run; None where the folder belongs to a task that trains nothing."""
    try:
        config = flat(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        if config.get("task._target_") != "alignment.task.fit.run" and not (folder / "metrics.csv").exists():
            return None
        if (folder / "error.txt").exists():
            with open(folder / "error.txt", encoding="utf-8") as file:
                return Run(folder, FAILED, file.readline().strip(), config)
        if not (folder / "summary.json").exists():
            return Run(folder, UNFINISHED, "it has no summary.json: still running, or killed", config)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        MetricsFile(folder).read()
        return Run(folder, DONE, "", config, flat(summary))
    except (OSError, ValueError, AttributeError, yaml.YAMLError, UserError) as error:
        return Run(folder, BROKEN, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings by dotted key; lists are kept whole, as text."""
    found: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = json.dumps(value) if isinstance(value, (list, Mapping)) else value
    return found


# ---- what differs --------------------------------------------------------------------------------------------------
def find_factors(runs: Sequence[Run]) -> list[str]:
    """Config keys whose values differ between runs that have them: first the classes chosen, then words, then numbers.

    A key that follows from the words before it is left out: with `algorithm=dpo,simpo` everything that the second
    option sets otherwise. A number is never left out for following from another, or a random search would have one.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    varying = [key for key in keys if _is_factor(key) and len({_text(v) for v in _values(runs, key)}) > 1]
    varying.sort(key=lambda key: (not key.endswith("_target_"), not _is_words(runs, key)))
    words: list[str] = []
    kept: list[str] = []
    for key in varying:
        if words and _follows_from(runs, key, words):
            continue
        kept.append(key)
        words += [key] if _is_words(runs, key) else []
    return kept


def _is_factor(key: str) -> bool:
    return not any(key == name or key.startswith(f"{name}.") for name in NO_FACTORS)


def _values(runs: Sequence[Run], key: str) -> list[Any]:
    return [run.config[key] for run in runs if key in run.config]


def _is_words(runs: Sequence[Run], key: str) -> bool:
    return any(isinstance(value, str) for value in _values(runs, key))


def _follows_from(runs: Sequence[Run], key: str, others: Sequence[str]) -> bool:
    seen: dict[tuple[str, ...], str] = {}
    for run in runs:
        if key in run.config:
            value, given = _text(run.config[key]), tuple(_text(run.config.get(other)) for other in others)
            if seen.setdefault(given, value) != value:
                return False
    return True


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def short_names(factors: Sequence[str]) -> dict[str, str]:
    """Factor -> column name: its last word, or as many from the end as tell it from the others; `x._target_` is `x`."""
    paths = {key: key.removesuffix("._target_").split(".") for key in factors}
    names: dict[str, str] = {}
    for key, path in paths.items():
        for length in range(1, len(path) + 1):
            name = ".".join(path[-length:])
            if sum(".".join(other[-length:]) == name for other in paths.values()) == 1:
                break
        names[key] = name
    return names


def level(value: Any) -> Any:
    """A factor's value as a reader knows it: the last word of a class, the number itself, `null` for none."""
    if value is None:
        return "null"
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith("alignment.") else value


# ---- tables --------------------------------------------------------------------------------------------------------
def run_table(runs: Sequence[Run], factors: Sequence[str]) -> Table:
    """One row per run: folder, status, reason, the factors, seed, and the finite numbers of its summary."""
    names = short_names(factors)
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": str(run.folder), "status": run.status, "reason": run.reason}
        row |= {names[key]: level(run.config[key]) if key in run.config else None for key in factors}
        row["seed"] = run.seed
        row |= {name: value for name, value in run.summary.items() if _is_number(value)}
        rows.append(row)
    return pd.DataFrame(rows)


def curve_table(runs: Sequence[Run], factors: Sequence[str]) -> Table:
    """One row per run, step and phase with the metrics measured then, the factors and the seed beside them."""
    names = short_names(factors)
    rows = []
    for run in runs:
        common = {names[key]: level(run.config[key]) if key in run.config else None for key in factors}
        common |= {"run": str(run.folder), "seed": run.seed}
        rows += [common | row for row in run.metrics()]
    return pd.DataFrame(rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
