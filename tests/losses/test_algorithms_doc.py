"""docs/algorithms.md names what exists, every loss has its row, and the choices that the code cites are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from alignment.losses.cpo import CPO_LOSSES
from alignment.losses.dpo import LOSSES
from alignment.losses.grpo import POLICY_LOSSES
from alignment.losses.kl import ESTIMATORS, KL_LOSSES
from alignment.losses.kto import KTO_LOSSES
from alignment.losses.online import nash_md, xpo
from alignment.losses.reduce import REDUCTIONS
from alignment.losses.tpo import TPO_LOSSES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
CITED = [(file, name) for file, names in re.findall(r"`(\w+)\.py: ([\w, ]+)`", PAGE) for name in names.split(", ")]


def test_what_the_page_names_exists() -> None:
    missing = [
        f"{file}.py: {name}"
        for file, name in CITED
        if not hasattr(importlib.import_module(f"alignment.losses.{file}"), name)
    ]
    assert len(CITED) > 60
    assert not missing


def test_every_loss_has_its_row() -> None:
    functions = [*LOSSES.values(), *CPO_LOSSES.values(), *TPO_LOSSES.values(), *KTO_LOSSES.values(), xpo, nash_md]
    functions += [loss.function for loss in POLICY_LOSSES.values()]
    cited = {name for _, name in CITED}
    assert not [function.__name__ for function in functions if function.__name__ not in cited]
    rows = {cell.strip(" `") for line in PAGE.splitlines() for cell in line.split("|")[1:2]}
    assert not set(REDUCTIONS) - rows
    assert not [name for name in KL_LOSSES if f"loss `{name}`" not in PAGE]
    assert set(ESTIMATORS) <= {name for file, name in CITED if file == "kl"}


def test_every_choice_the_code_cites_is_explained() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "alignment").rglob("*.py"))
    cited = set(re.findall(r"\bD\d{1,2}\b", sources))
    assert cited
    assert not cited - set(re.findall(r"^\| (D\d+) ", PAGE, flags=re.MULTILINE))
