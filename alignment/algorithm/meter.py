"""Metrics of one optimizer step, as sums and counts over its microbatches and ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from alignment.losses.sft import perplexity


class Meter:
    """Adds numerators and denominators, so a metric is sum / sum, never a mean of means.

    Holds plain floats: nothing keeps a graph or a tensor alive between steps.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._totals: set[str] = set()
        self._exps: set[str] = set()

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to the mean `name`, those under `mask` if one is given. NaN = absent."""
        values = values.detach().float()
        keep = ~values.isnan() if mask is None else mask.bool().expand_as(values) & ~values.isnan()
        self.add(name, float(torch.where(keep, values, 0.0).sum()), float(keep.sum()))

    def add(self, name: str, value: float, count: float) -> None:
        """Add `count` items whose sum is `value` to the mean `name`."""
        self._sums[name] += value
        self._counts[name] += count

    def exp_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to a mean that is reported as its exponential: perplexity, from negative log-likelihoods."""
        self._exps.add(name)
        self.mean(name, values, mask)

    def total(self, name: str, value: float) -> None:
        """Add to a sum that is reported as it is (tokens, seconds)."""
        self._totals.add(name)
        self._sums[name] += value

    def flush(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Means and totals since the last flush; a mean over nothing is absent. `reduce` sums (R, 2) over ranks."""
        names = sorted(self._sums)
        table = torch.tensor([[self._sums[n], self._counts[n]] for n in names], dtype=torch.float64).reshape(-1, 2)
        table = table if reduce is None else reduce(table)
        values: dict[str, float] = {}
        for name, (total, count) in zip(names, table.tolist(), strict=True):
            if name in self._totals:
                values[name] = total
            elif count:
                mean = torch.tensor(total / count, dtype=torch.float64)
                values[name] = float(perplexity(mean) if name in self._exps else mean)
        self._sums.clear()
        self._counts.clear()
        self._totals.clear()
        self._exps.clear()
        return values
