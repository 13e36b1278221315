"""Intervals against scipy and against simulation, corrections against hand arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from alignment.experiment.statistics import (
    caution,
    compare_to,
    expanded_level,
    holm,
    interquartile_interval,
    interquartile_mean,
    mean_interval,
    paired_difference,
    range_coverage,
)

NUMBERS = [0.31, 0.44, 0.36, 0.52, 0.40, 0.47, 0.35, 0.41, 0.39, 0.45]


def test_the_interval_is_scipys_percentile_bootstrap_at_the_expanded_level() -> None:
    """Percentile level of Hesterberg 2015: n = 10, 2 * Phi(-sqrt(10/9) * 2.262) = 2 * Phi(-2.3846) = 0.01710."""
    assert 1 - expanded_level(10) == pytest.approx(0.01710, abs=1e-4)
    ours = mean_interval(NUMBERS, num_resamples=200_000)
    theirs = stats.bootstrap((NUMBERS,), np.mean, confidence_level=expanded_level(10), method="percentile",
                             n_resamples=200_000, rng=1).confidence_interval  # fmt: skip
    assert ours.value == pytest.approx(0.41)
    assert (ours.low, ours.high) == (pytest.approx(theirs.low, abs=2e-3), pytest.approx(theirs.high, abs=2e-3))


@pytest.mark.parametrize("n", [5, 10, 30])
def test_it_covers_the_mean_as_often_as_it_says(n: int) -> None:
    """2000 samples of a normal: 95 % within 2 %. A plain percentile interval of five values covers 83 %."""
    samples = np.random.default_rng(0).normal(size=(2000, n))
    inside = [(e := mean_interval(x, num_resamples=1000)).low <= 0 <= e.high for x in samples]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_three_values_give_their_range_and_its_coverage_is_told() -> None:
    estimate = mean_interval([0.5, 0.7, 0.6])
    assert (estimate.low, estimate.high) == (0.5, 0.7)
    samples = np.random.default_rng(1).normal(size=(4000, 3))
    inside = np.mean((samples.min(1) <= 0) & (samples.max(1) >= 0))
    assert inside == pytest.approx(range_coverage(3), abs=0.02)
    assert range_coverage(3) == 0.75
    assert "75%" in caution([3, 8])


def test_one_value_has_no_interval() -> None:
    estimate = mean_interval([0.5])
    assert estimate.value == 0.5
    assert math.isnan(estimate.low)
    assert math.isnan(mean_interval([]).value)
    assert "single seed" in caution([1, 3])
    assert caution([5, 8]) == ""


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -50]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    estimate = interquartile_interval([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)  # resampling stays within the groups


def test_differences_are_paired_by_seed_and_tested_as_scipy_does() -> None:
    one, two = {1: 0.5, 2: 0.7, 3: 0.61, 9: 5.0}, {3: 0.52, 2: 0.6, 1: 0.45, 7: -5.0}
    found = paired_difference(one, two)
    assert found.n == 3
    assert found.value == pytest.approx((0.05 + 0.10 + 0.09) / 3)
    assert found.p == pytest.approx(stats.ttest_rel([0.5, 0.7, 0.61], [0.45, 0.6, 0.52]).pvalue)
    assert math.isnan(paired_difference({1: 0.5}, {1: 0.4}).p)
    assert paired_difference({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}).p == 1


def test_holms_correction() -> None:
    """0.01 * 4; 0.02 * 3; 0.03 * 2 = 0.06; 0.04 * 1 = 0.04, raised to 0.06 so that the order stays."""
    assert holm([0.04, 0.01, math.nan, 0.03, 0.02])[:2] == [pytest.approx(0.06), pytest.approx(0.04)]
    assert holm([0.04, 0.01, 0.03, 0.02])[2:] == [pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_every_setting_is_compared_to_the_baseline() -> None:
    cells = {"a": {1: 0.1, 2: 0.2}, "b": {1: 0.3, 2: 0.5}, "c": {1: 0.1, 2: 0.21}}
    found = compare_to(cells, "a")
    assert set(found) == {"b", "c"}
    assert found["b"].value == pytest.approx(0.25)
    assert found["b"].p_corrected == pytest.approx(min(1, 2 * found["b"].p))
