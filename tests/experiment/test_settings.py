"""From runs to settings, and the tables of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from alignment.errors import UserError
from alignment.experiment.runs import curve_table, find_runs
from alignment.experiment.settings import Comparison, compare
from alignment.experiment.tables import latex, markdown, number, p_value, settings_frame, write_tables


@pytest.fixture
def comparison(make_run, tmp_path: Path) -> Comparison:
    """beta 0.1: 0.50, 0.52, 0.54; beta 0.2: 0.60, 0.64, 0.62 on the same seeds; and a failed run."""
    for beta, values in ((0.1, (0.50, 0.52, 0.54)), (0.2, (0.60, 0.64, 0.62))):
        for seed, value in enumerate(values):
            make_run(f"{beta}-{seed}", {"algorithm.beta": beta, "seed": seed}, accuracy=value)
    (make_run("bad", {"algorithm.beta": 0.2, "seed": 9}, accuracy=9.0) / "error.txt").write_text("ValueError: x")
    return compare(find_runs([tmp_path]))


def test_settings_are_means_over_seeds_best_first(comparison: Comparison) -> None:
    assert comparison.metric == "val/accuracy"
    assert comparison.higher_is_better
    assert comparison.baseline == "beta=0.1"
    assert [(s.label, s.num_seeds) for s in comparison.settings] == [("beta=0.2", 3), ("beta=0.1", 3)]
    assert comparison.settings[0].estimate.value == pytest.approx(0.62)
    difference = comparison.settings[0].difference
    assert difference is not None
    assert difference.value == pytest.approx(0.1)
    assert (difference.low, difference.high) == (pytest.approx(0.08), pytest.approx(0.12))
    assert comparison.settings[1].difference is None
    assert comparison.overall.value == pytest.approx((0.52 + 0.54 + 0.60 + 0.62) / 4)
    assert "3 in at least one setting" in comparison.caution


def test_a_loss_is_better_when_lower(make_run, tmp_path: Path) -> None:
    for name, value in (("0", 0.5), ("1", 0.4)):
        folder = make_run(name, {"algorithm.beta": value, "seed": 0}, accuracy=0.1)
        (folder / "summary.json").write_text(f'{{"val/loss": {value}}}')
    assert [s.label for s in compare(find_runs([tmp_path])).settings] == ["beta=0.4", "beta=0.5"]


def test_the_baseline_can_be_named_in_any_order(make_run, tmp_path: Path) -> None:
    for number_, (beta, clip) in enumerate([(0.1, 0.2), (0.1, 0.3), (0.4, 0.2), (0.4, 0.3)]):
        config = {"algorithm.beta": beta, "algorithm.clip_eps": clip, "seed": 0}
        make_run(str(number_), config, accuracy=0.1 * number_)
    runs = find_runs([tmp_path])
    assert compare(runs, baseline="clip_eps=0.3 beta=0.1").baseline == "beta=0.1 clip_eps=0.3"
    with pytest.raises(UserError, match=r"task.baseline: 'beta=9' is no setting: type .*beta=0.1 clip_eps=0.2"):
        compare(runs, baseline="beta=9")
    with pytest.raises(
        UserError, match=r"task.metric: .* measured val/nothing: type task.metric=<one of .*val/accuracy"
    ):
        compare(runs, metric="val/nothing")


def test_runs_of_one_seed_count_once(make_run, tmp_path: Path) -> None:
    for name, value in (("0", 0.4), ("1", 0.6)):
        make_run(name, {"seed": 3}, accuracy=value)
    (setting,) = compare(find_runs([tmp_path])).settings
    assert (setting.label, setting.by_seed) == ("all runs", {3: pytest.approx(0.5)})


def test_the_tables(comparison: Comparison, tmp_path: Path) -> None:
    text = markdown(comparison).splitlines()
    assert text[0] == "| beta | seeds | val/accuracy | 95% interval | difference | 95% interval | p (Holm) |"
    assert text[2].startswith("| 0.2 | 3 | 0.6200 | [0.6000, 0.6400] | +0.1000 | [+0.0800, +0.1200] | 0.0")
    assert text[3] == "| 0.1 | 3 | 0.5200 | [0.5000, 0.5400] | baseline |  |  |"
    tex = latex(comparison)
    assert r"0.2 & 3 & 0.6200 & [0.6000, 0.6400] & +0.1000" in tex
    assert tex.count(r"\\") == 3
    runs = find_runs([tmp_path / "sweep"])
    write_tables(comparison, curve_table(runs[:6], comparison.keys), tmp_path)
    for name, rows in (("runs", 7), ("curves", 18)):
        csv, parquet = pd.read_csv(tmp_path / f"{name}.csv"), pd.read_parquet(tmp_path / f"{name}.parquet")
        assert len(csv) == len(parquet) == rows
        assert list(csv.columns) == list(parquet.columns)
    assert settings_frame(comparison)["mean"].tolist() == [pytest.approx(0.62), pytest.approx(0.52)]


def test_what_latex_would_read_is_escaped(make_run, tmp_path: Path) -> None:
    for name, kind in (("0", "a_b"), ("1", "50% & more")):
        make_run(name, {"data.kind": kind, "seed": 0}, accuracy=0.5)
    tex = latex(compare(find_runs([tmp_path])))
    assert r"a\_b &" in tex
    assert r"50\% \& more &" in tex


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (-0.25, "\N{MINUS SIGN}0.2500"),
        (1.5e-5, "1.5e\N{MINUS SIGN}05"),
        (0.0, "0.0000"),
        (123456.0, "1.23e+05"),
        (float("nan"), ""),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_p_values() -> None:
    assert (p_value(0.0421), p_value(1e-5), p_value(float("nan"))) == ("0.042", "< 0.001", "")
