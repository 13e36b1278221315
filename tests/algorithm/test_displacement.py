"""The watch speaks where the chosen log-probs fall steadily while margins rise, once, and nowhere else."""

from __future__ import annotations

import random

import pytest

from alignment.algorithm.displacement import WINDOW, DisplacementWatch


def feed(watch: DisplacementWatch, chosen: list[float], margins: list[float]) -> list[tuple[int, float, float]]:
    """(row, first mean, last mean) of each time it speaks."""
    found = [(i, watch.add(c, m)) for i, (c, m) in enumerate(zip(chosen, margins, strict=True))]
    return [(i, *value) for i, value in found if value is not None]


RISING = [0.1 * i for i in range(60)]


def test_a_steady_fall_is_named_once_with_both_levels() -> None:
    # -0.5 a row: rows 0-7 average -1.75, rows 8-15 average -5.75
    assert feed(DisplacementWatch(), [-0.5 * i for i in range(60)], RISING) == [(15, -1.75, -5.75)]


def test_a_slow_fall_is_named_when_it_has_reached_a_nat() -> None:
    # -0.05 a row: the first window's middle is row 3.5, 20 rows on from it are 1 nat, the last row is 3.5 further
    ((row, first, last),) = feed(DisplacementWatch(), [-0.05 * i for i in range(60)], RISING)
    assert row == 27
    assert first - last == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("chosen", "margins"),
    [
        ([-0.5 * i for i in range(60)], [0.0] * 60),  # margins stand still
        ([-0.5 * i for i in range(60)], [-0.1 * i for i in range(60)]),  # and fall
        ([0.5 * i for i in range(60)], RISING),  # chosen rises
        ([-0.01 * i for i in range(60)], RISING),  # falls by 0.6 nats in all
        ([0.0] * 10 + [-9.0] + [0.0] * 49, RISING),  # one odd batch: its window averages -1.1 +- 1.1
    ],
)
def test_it_is_silent_otherwise(chosen: list[float], margins: list[float]) -> None:
    assert feed(DisplacementWatch(), chosen, margins) == []


def test_noise_alone_hardly_ever_speaks() -> None:
    """Batches whose lengths differ: a level of -40 +- 15 without a trend, margins that rise. 200 runs of 60 rows."""
    rng, false = random.Random(0), 0
    for _ in range(200):
        false += bool(feed(DisplacementWatch(), [rng.gauss(-40, 15) for _ in range(60)], RISING))
    assert false <= 6


def test_a_restored_watch_goes_on_as_the_other() -> None:
    chosen = [-0.05 * i for i in range(60)]
    for cut in (0, 3, WINDOW, 12, 27, 28, 40):
        before, after = DisplacementWatch(), DisplacementWatch()
        spoken = feed(before, chosen[:cut], RISING[:cut])
        after.load_state_dict(before.state_dict())
        assert [row for row, *_ in spoken] + [cut + row for row, *_ in feed(after, chosen[cut:], RISING[cut:])] == [27]
