"""From runs to settings: one row for each combination of the factors, with means over seeds and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from alignment.errors import UserError
from alignment.experiment.runs import DONE, Run, Table, find_factors, run_table, short_names
from alignment.experiment.statistics import (
    Difference,
    Estimate,
    caution,
    compare_to,
    interquartile_interval,
    mean_interval,
)

# What a report is about if nobody says: the first of these that the runs have measured.
METRICS = ("val/accuracy", "val/reward", "val/rewards/accuracies", "val/accuracies", "val/loss", "train/loss")
LOWER_IS_BETTER = ("loss", "nll", "perplexity", "kl", "ece", "seconds", "gib")


@dataclass
class Setting:
    """One combination of factor levels and the metric of its runs, by seed."""

    label: str
    levels: dict[str, Any]
    by_seed: dict[Any, float]
    estimate: Estimate
    difference: Difference | None = None  # to the baseline; None for the baseline itself

    @property
    def num_seeds(self) -> int:
        return len(self.by_seed)


@dataclass
class Comparison:
    """Everything a report says about one metric."""

    metric: str
    higher_is_better: bool
    factors: list[str]  # column names
    keys: list[str]  # the config keys they stand for
    table: Table  # one row per run, broken ones included
    settings: list[Setting]  # the best first
    baseline: str
    level: float  # of every interval
    overall: Estimate  # interquartile mean over every run, resampled within settings
    caution: str

    @property
    def left_out(self) -> Table:
        """The runs that no number of it comes from; `reason` says why."""
        return self.table[self.table["reason"] != ""]


def compare(
    runs: Sequence[Run], *, metric: str | None = None, baseline: str | None = None, level: float = 0.95
) -> Comparison:
    """Group finished runs by what differs between them and compare their metric.

    baseline: the label of a setting, such as `beta=0.1 loss=ipo`; None = the first run's. UserError for a metric or a
    baseline that no finished run has.
    """
    done = [run for run in runs if run.status == DONE]
    keys = find_factors(done)
    names = short_names(keys)
    metric = _metric(done, metric)
    table = run_table(runs, keys)
    unmeasured = (table["status"] == DONE) & table[metric].isna()
    table.loc[unmeasured, "reason"] = f"it has not measured {metric}"
    groups: dict[str, list[Any]] = {}
    for _, row in table[(table["status"] == DONE) & ~unmeasured].iterrows():
        groups.setdefault(label_of(row, list(names.values())), []).append(row)
    settings = [_setting(label, rows, list(names.values()), metric, level) for label, rows in groups.items()]
    base = _baseline(baseline, settings)
    differences = compare_to({s.label: s.by_seed for s in settings}, base, level=level)
    for setting in settings:
        setting.difference = differences.get(setting.label)
    higher = not any(word in metric.rpartition("/")[2] for word in LOWER_IS_BETTER)
    settings.sort(key=lambda s: s.estimate.value, reverse=higher)
    overall = interquartile_interval([list(s.by_seed.values()) for s in settings], level=level)
    warning = caution([s.num_seeds for s in settings])
    return Comparison(metric, higher, list(names.values()), keys, table, settings, base, level, overall, warning)


def _metric(done: Sequence[Run], metric: str | None) -> str:
    found = dict.fromkeys(name for run in done for name, value in run.summary.items() if isinstance(value, float))
    if metric is not None and metric not in found:
        raise UserError(f"task.metric: no finished run has measured {metric}: type task.metric=<one of {_few(found)}>")
    chosen = metric or next((name for name in METRICS if name in found), None)
    if chosen is None:
        raise UserError(f"runs: no finished run has a metric to compare; they have {_few(found) or 'none'}")
    return chosen


def _few(names: Sequence[str] | dict[str, None]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:12]) + (f", ... ({len(shown)} in all)" if len(shown) > 12 else "")


def label_of(row: Any, factors: Sequence[str]) -> str:
    """`beta=0.1 loss=ipo`; `all runs` where nothing differs."""
    parts = [f"{name}={_level(row[name])}" for name in factors if not _absent(row[name])]
    return " ".join(parts) or "all runs"


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _level(value: Any) -> str:
    """Numbers as they are typed: a column of mixed whole numbers and gaps holds floats."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting(label: str, rows: list[Any], factors: list[str], metric: str, level: float) -> Setting:
    """Runs that share a seed too (repeated by hand) are averaged, so that each seed counts once."""
    by_seed: dict[Any, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(float(row[metric]))
    means = {seed: sum(values) / len(values) for seed, values in by_seed.items()}
    levels = {name: rows[0][name] for name in factors if not _absent(rows[0][name])}
    return Setting(label, levels, means, mean_interval(list(means.values()), level=level))


def _baseline(wanted: str | None, settings: Sequence[Setting]) -> str:
    labels = [setting.label for setting in settings]
    if wanted is None:
        return labels[0]
    for label in labels:
        if set(wanted.split()) == set(label.split()):
            return label
    raise UserError(f"task.baseline: {wanted!r} is no setting: type \"task.baseline='<one of {_few(labels)}>'\"")
