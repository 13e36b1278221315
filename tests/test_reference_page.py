"""docs/reference.md: the printed grid is what the program does today, and says of each option what is known of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_grid", ROOT / "scripts" / "reference_grid.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed() -> dict[str, dict[str, str]]:
    """Cells of the printed grid by algorithm and column."""
    rows = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in PAGE.splitlines() if "| " in line]
    header = next(row for row in rows if row[0] == "algorithm=")
    body = rows[rows.index(header) + 1 :]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in body}


def test_the_printed_grid_is_current(script: ModuleType) -> None:
    assert script.page_with(script.table()) == PAGE, "type python scripts/reference_grid.py"


def test_every_option_has_its_row_and_column() -> None:
    grid = printed()
    assert set(grid) == {path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")}
    strategies = {path.stem for path in (ROOT / "conf" / "ref_strategy").glob("*.yaml")}
    assert all(set(row) == {"reference", *strategies} for row in grid.values())
    assert all(f"| `{name}` |" in PAGE.split("algorithm=")[0] for name in strategies), "its line in the first table"


@pytest.mark.parametrize(
    ("algorithm", "reference", "refused"),
    [
        ("dpo", "always", {"none"}),
        ("kto", "always", {"none"}),
        ("simpo", "never", {"sync"}),
        ("sft", "never", {"sync"}),
        ("grpo", "if beta > 0", {"precompute"}),
        ("online_dpo", "always", {"none", "precompute"}),
    ],
)
def test_rows_that_are_known(algorithm: str, reference: str, refused: set[str]) -> None:
    row = printed()[algorithm]
    assert row.pop("reference") == reference
    assert {strategy for strategy, cell in row.items() if cell.startswith("no")} == refused


def test_where_beta_decides_it_says_so() -> None:
    """GRPO has beta 0.04 and DAPO none."""
    grid = printed()
    assert grid["grpo"]["none"] == "with `algorithm.beta=0"
    assert grid["dapo"]["none"] == "yes"
    assert grid["dapo"]["sync"] == "with `algorithm.beta` > 0"
    assert grid["grpo"]["sync"] == "yes"
