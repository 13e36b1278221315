"""What the figures of a report show: the numbers in them, not the pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alignment.experiment.curves import COLOURS, STYLES
from alignment.experiment.figures import (
    banded,
    draw_figures,
    factor_effects,
    frontier,
    heat_map,
    learning_curves,
    shown,
    sort_levels,
)
from alignment.experiment.runs import Table, curve_table, find_runs
from alignment.experiment.settings import Comparison, compare


@pytest.fixture
def compared(make_run, tmp_path: Path) -> tuple[Comparison, Table]:
    number = 0
    for beta in (0.0, 0.2):
        for clip in (0.1, 0.2, 0.3):
            for seed in (1, 2):
                config = {"algorithm.beta": beta, "algorithm.clip_eps": clip, "seed": seed}
                make_run(str(number), config, accuracy=beta + clip + 0.02 * seed, kl=2 - beta)
                number += 1
    runs = find_runs([tmp_path])
    comparison = compare(runs)
    return comparison, curve_table(runs, comparison.keys)


def test_curves_are_means_over_seeds_with_their_band(compared) -> None:
    comparison, curves = compared
    figure = learning_curves(comparison, curves)
    assert figure is not None
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert set(lines) == {f"beta={b} clip_eps={c}" for b in ("0", "0.2") for c in ("0.1", "0.2", "0.3")}
    np.testing.assert_allclose(np.asarray(lines["beta=0.2 clip_eps=0.1"].get_ydata(), float), [0, 0.165, 0.33])
    band = banded(curves[(curves["beta"] == 0.2) & (curves["clip_eps"] == 0.1)], "val/accuracy")
    assert band["low"].tolist() == pytest.approx([0, 0.16, 0.32])
    assert band["high"].tolist() == pytest.approx([0, 0.17, 0.34])


def test_an_effect_is_the_mean_over_everything_else(compared) -> None:
    figure = factor_effects(compared[0])
    assert figure is not None
    by_name = {axes.get_xlabel(): axes for axes in figure.axes}
    np.testing.assert_allclose(np.asarray(by_name["beta"].get_lines()[0].get_ydata(), float), [0.23, 0.43])
    np.testing.assert_allclose(np.asarray(by_name["clip_eps"].get_lines()[0].get_ydata(), float), [0.23, 0.33, 0.43])


def test_the_frontier_pairs_kl_and_metric_of_one_evaluation(compared) -> None:
    figure = frontier(*compared)
    assert figure is not None
    (line,) = [line for line in figure.axes[0].get_lines() if np.isclose(np.asarray(line.get_ydata(), float)[-1], 0.13)]
    np.testing.assert_allclose(np.asarray(line.get_xdata()), [0, 1, 2])


def test_the_heat_map_has_a_cell_per_pair_of_levels(compared) -> None:
    figure = heat_map(compared[0])
    assert figure is not None
    grid = figure.axes[0].get_images()[0].get_array()
    assert grid is not None
    np.testing.assert_allclose(grid, [[0.13, 0.23, 0.33], [0.33, 0.43, 0.53]])
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("clip_eps", "beta")


def test_every_figure_is_written_in_every_format(compared, tmp_path: Path) -> None:
    draw_figures(compared[0], compared[1], tmp_path, ["png", "svg", "pdf"])
    names = {
        f"{n}.{s}" for n in ("learning_curves", "factor_effects", "frontier", "heat_map") for s in ("png", "svg", "pdf")
    }
    assert names <= {path.name for path in tmp_path.iterdir()}


def test_one_setting_needs_no_effects_and_no_map(make_run, tmp_path: Path) -> None:
    make_run("0", {"seed": 0}, accuracy=0.5)
    runs = find_runs([tmp_path])
    comparison = compare(runs)
    written = draw_figures(comparison, curve_table(runs, comparison.keys), tmp_path, ["png"])
    assert [path.stem for path in written] == ["learning_curves", "frontier"]


def test_of_many_settings_the_best_and_the_baseline_are_drawn(make_run, tmp_path: Path) -> None:
    for number in range(20):
        make_run(str(number), {"algorithm.beta": float(number), "seed": 0}, accuracy=number / 20)
    labels = shown(compare(find_runs([tmp_path])))
    assert labels == [f"beta={number}" for number in range(19, 8, -1)] + ["beta=0"]


def test_levels_are_sorted_as_numbers_and_words() -> None:
    assert sort_levels({10, 9.5, "b", "a"}) == [9.5, 10, "a", "b"]


def test_seven_curves_look_different() -> None:
    """With six colours the seventh curve was drawn as the first."""
    assert len(set(STYLES)) == len(STYLES) == 4 * len(COLOURS)
    assert len({colour for colour, _, _ in STYLES[: len(COLOURS)]}) == len(COLOURS)
