"""The published numbers (tests/data/vectors.json): one fixture that loads a vector and keeps account of its keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors.json"
# float64 against float64: rounding is all that may differ. Zeros in the file are sums of rounding errors.
RTOL_VALUE, RTOL_GRAD, ATOL_ZERO = 1e-7, 1e-6, 1e-12


def to_tensor(value: Any) -> Any:
    """Numbers in nested lists -> float64, booleans -> bool; null -> NaN. Anything else as it is."""
    flat = [value]
    while any(isinstance(item, list) for item in flat):
        flat = [x for item in flat for x in (item if isinstance(item, list) else [item])]
    if any(isinstance(item, bool) for item in flat):
        return torch.tensor(value)
    if all(item is None or isinstance(item, (int, float)) for item in flat):
        return ragged(value) or torch.tensor(fill(value), dtype=torch.float64)
    return value


def ragged(value: Any) -> list[Tensor] | None:
    """Rows of different lengths, one tensor each."""
    if not isinstance(value, list) or len({len(row) for row in value if isinstance(row, list)}) < 2:
        return None
    return [to_tensor(row) for row in value]


def fill(value: Any) -> Any:
    if isinstance(value, list):
        return [fill(item) for item in value]
    return float("nan") if value is None else value


def leaves(expected: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in expected.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key)


class Vector:
    """inputs (float64 tensors; masks bool), params and expected of one vector, and which of expected was compared."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.name, self.params = entry["name"], entry["params"]
        self.inputs = {key: to_tensor(value) for key, value in entry["inputs"].items()}
        for key, value in self.inputs.items():
            if key in ("mask", "label", "has_eos", "selected") or key.endswith("_mask"):
                self.inputs[key] = value.bool()
        self.expected = entry["expected"]
        self.open = set(leaves(self.expected))

    def __getitem__(self, key: str) -> Any:
        return self.inputs[key]

    def leaf(self, key: str) -> Tensor:
        """An input to differentiate by."""
        self.inputs[key].requires_grad_()
        return self.inputs[key]

    def check(self, key: str, actual: Any) -> None:
        """Compare with expected[key]; `a/b` reaches into a nested one. Gradients (a key with `grad`) at 1e-6."""
        path = tuple(key.split("/"))
        wanted: Any = self.expected
        for part in path:
            wanted = wanted[part]
        self.open.discard(path)
        wanted = torch.as_tensor(to_tensor(wanted), dtype=torch.float64)
        actual = torch.as_tensor(actual).detach().to(torch.float64)
        rtol = RTOL_GRAD if "grad" in path[-1] else RTOL_VALUE
        torch.testing.assert_close(
            actual, wanted, rtol=rtol, atol=ATOL_ZERO, equal_nan=True, msg=lambda m: f"{self.name}/{key}: {m}"
        )

    def check_grad(self, key: str, loss: Tensor, wrt: Tensor) -> None:
        self.check(key, torch.autograd.grad(loss, wrt, retain_graph=True)[0])

    def leave(self, *keys: str) -> None:
        """Keys that are another program's variant, or a wrong result shown for contrast."""
        for key in keys:
            path = tuple(key.split("/"))
            hit = {leaf for leaf in self.open if leaf[: len(path)] == path}
            assert hit, f"{self.name} has no open key {key}"
            self.open -= hit


@pytest.fixture(scope="session")
def entries() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(VECTORS.read_text())}


@pytest.fixture
def vector(entries: dict[str, dict[str, Any]]) -> Iterator[Callable[..., Vector]]:
    """vector(name): every expected key must be compared by the test, or left by name; partly=True lifts that."""
    whole: list[Vector] = []

    def load(name: str, *, partly: bool = False) -> Vector:
        loaded = Vector(json.loads(json.dumps(entries[name])))
        if not partly:
            whole.append(loaded)
        return loaded

    yield load
    missed = [f"{v.name}: {sorted('/'.join(path) for path in v.open)}" for v in whole if v.open]
    assert not missed, f"expected values that the test never compared: {missed}"
