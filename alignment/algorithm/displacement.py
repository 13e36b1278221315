"""A watch for likelihood displacement: the chosen answers become less likely while the margins still grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Rows of metrics that one mean is taken over, and how far apart two means must be.
WINDOW = 8
NUM_ERRORS = 4.0
MIN_FALL = 1.0  # nats: the chosen answers have become e times less likely


class DisplacementWatch:
    """Says once whether the chosen log-probs have fallen steadily while the margins rose (2410.08847 names it).

    Fed with means over all pairs and ranks, one row per logged step. Displaced means, with means over WINDOW rows each:
    the last is below the first by MIN_FALL nats and by NUM_ERRORS standard errors, it is also below the one just
    before it, so that it is still falling, and the margin is above its first by NUM_ERRORS standard errors. Batches
    differ in length, and so do their log-probs: hence the standard errors. The state is small and goes into the
    checkpoint, so that a resumed run says the same.
    """

    def __init__(self) -> None:
        self.first: list[tuple[float, float]] = []
        self.recent: list[tuple[float, float]] = []
        self.warned = False

    def add(self, chosen: float, margin: float) -> tuple[float, float] | None:
        """Take one row. The first and the last mean of the chosen log-probs when displacement shows, at most once."""
        row = (chosen, margin)
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.recent = [*self.recent, row][-2 * WINDOW :]
        if self.warned or len(self.recent) < 2 * WINDOW:
            return None
        (start, before, now), margins = self._windows(0), self._windows(1)
        fell = _mean(start) - _mean(now) >= MIN_FALL and _apart(start, now) and _mean(now) < _mean(before)
        self.warned = fell and _apart(margins[2], margins[0])
        return (_mean(start), _mean(now)) if self.warned else None

    def _windows(self, column: int) -> tuple[list[float], list[float], list[float]]:
        first, recent = ([row[column] for row in rows] for rows in (self.first, self.recent))
        return first, recent[:WINDOW], recent[WINDOW:]

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "recent": self.recent, "warned": self.warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.recent, self.warned = list(state["first"]), list(state["recent"]), state["warned"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _apart(high: Sequence[float], low: Sequence[float]) -> bool:
    """Whether the mean of `high` is above that of `low` by NUM_ERRORS standard errors of their difference."""
    spread = sum(
        sum((x - _mean(values)) ** 2 for x in values) / (len(values) - 1) / len(values) for values in (high, low)
    )
    gap = _mean(high) - _mean(low)
    return gap > 0 and gap >= NUM_ERRORS * math.sqrt(spread)
