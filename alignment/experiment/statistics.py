"""Means over seeds with intervals, the interquartile mean, and paired differences corrected for many comparisons.

All resampling is vectorised and seeded: the same numbers give the same intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

NUM_RESAMPLES = 10_000
# Below this many seeds an interval is reported with its real coverage, which is then clearly under its name.
FEW_SEEDS = 5


class Estimate(NamedTuple):
    """A value with its interval; `n` numbers went into it."""

    value: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """Mean of paired differences with its interval; p two-sided, `p_corrected` by Holm over the comparisons made."""

    value: float
    low: float
    high: float
    n: int
    p: float
    p_corrected: float


def expanded_level(n: int, level: float = 0.95) -> float:
    """The percentile level whose interval over n values is as wide as Student's t asks for.

    A percentile bootstrap is narrow by sqrt((n - 1) / n) and uses the normal's quantile for t's; this widens it
    (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4.5).
    """
    tail = stats.t.ppf((1 - level) / 2, n - 1) * math.sqrt(n / (n - 1))
    return float(1 - 2 * stats.norm.cdf(tail))


def mean_interval(
    values: Sequence[float] | np.ndarray, *, level: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Estimate:
    """Mean with an expanded percentile bootstrap interval. One value has no interval (NaN); none is all NaN.

    With three or four values the interval is their range: no bootstrap can know more of them.
    """
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        value = float(x[0]) if len(x) else math.nan
        return Estimate(value, math.nan, math.nan, len(x))
    draws = np.random.default_rng(seed).integers(len(x), size=(num_resamples, len(x)))
    tail = (1 - expanded_level(len(x), level)) / 2
    low, high = np.quantile(x[draws].mean(1), [tail, 1 - tail])
    if tail < 1 / num_resamples:  # beyond what resamples reach: the range
        low, high = x.min(), x.max()
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def interquartile_mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of the middle half: a quarter of the values is cut off at each end (Agarwal et al. 2021, 2108.13264)."""
    return float(stats.trim_mean(np.asarray(values, dtype=float), 0.25))


def interquartile_interval(
    groups: Sequence[Sequence[float]], *, level: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Estimate:
    """Interquartile mean over all values of all groups, resampled within each group (2108.13264 sec. 4.1)."""
    generator = np.random.default_rng(seed)
    arrays = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not arrays:
        return Estimate(math.nan, math.nan, math.nan, 0)
    draws = [x[generator.integers(len(x), size=(num_resamples, len(x)))] for x in arrays]
    resampled = stats.trim_mean(np.concatenate(draws, 1), 0.25, axis=1)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    every = np.concatenate(arrays)
    return Estimate(interquartile_mean(every), float(low), float(high), len(every))


def paired_difference(
    values: dict[object, float], baseline: dict[object, float], *, level: float = 0.95, seed: int = 0
) -> Difference:
    """Mean of value - baseline over the seeds that both have; p of the paired t-test (NaN for fewer than two)."""
    shared = [key for key in values if key in baseline]
    gaps = np.array([values[key] - baseline[key] for key in shared], dtype=float)
    estimate = mean_interval(gaps, level=level, seed=seed)
    p = _t_test(gaps) if len(gaps) >= 2 else math.nan
    return Difference(*estimate, p=p, p_corrected=p)


def _t_test(gaps: np.ndarray) -> float:
    """Two-sided p of a mean of 0; equal gaps, whose t is not finite, are certainly 0 or certainly not."""
    if np.all(gaps == gaps[0]):
        return 1.0 if gaps[0] == 0 else 0.0
    result: Any = stats.ttest_1samp(gaps, 0.0)
    return float(result.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for as many comparisons as there are (Holm 1979); NaN is left out and stays."""
    known = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    corrected, highest = list(ps), 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[place] = highest
    return corrected


def compare_to(
    cells: dict[object, dict[object, float]], baseline: object, *, level: float = 0.95
) -> dict[object, Difference]:
    """Every cell's paired difference to the baseline cell, {cell: {seed: value}}, corrected over all of them."""
    found = {name: paired_difference(values, cells[baseline], level=level) for name, values in cells.items()}
    found.pop(baseline)
    corrected = holm([difference.p for difference in found.values()])
    return {
        name: difference._replace(p_corrected=p) for (name, difference), p in zip(found.items(), corrected, strict=True)
    }


def range_coverage(n: int) -> float:
    """How often the range of n values holds the mean of a symmetric distribution: 1 - 2^(1 - n). 3 seeds: 75 %."""
    return 1 - 2.0 ** (1 - n)


def caution(num_seeds: Sequence[int]) -> str:
    """What to keep in mind about intervals over so few seeds; empty where there are enough everywhere."""
    fewest = min(num_seeds, default=0)
    if fewest >= FEW_SEEDS:
        return ""
    if fewest <= 1:
        return (
            "At least one setting has a single seed: it has no interval, and its difference to another may be chance. "
            "Run three seeds to see the spread, five or more to compare."
        )
    return (
        f"Few seeds: {fewest} in at least one setting. An interval over {fewest} values is their range, which "
        f"covers the true mean in about {range_coverage(fewest):.0%} of cases only. Five or more seeds are needed "
        "for intervals that deserve their name."
    )
