"""In what two runs differ, and what of it a reader is spared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.experiment.difference import as_markdown, differences


@pytest.fixture
def two(make_run) -> tuple[Path, Path]:
    folders = []
    for name, beta, accuracy, torch in (("a", 0.1, 0.5, "2.13.0"), ("b", 0.2, 0.75, "2.13.1")):
        folder = make_run(name, {"algorithm.beta": beta, "algorithm.lr": 1e-4, "seed": 1}, accuracy=accuracy)
        manifest = {
            "started": name,
            "command": name,
            "git": {"commit": "c1", "branch": name},
            "packages": {"torch": torch},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest | {"data": {"train": "61 examples"}}))
        folders.append(folder)
    return folders[0], folders[1]


def test_only_what_differs_is_shown(two: tuple[Path, Path]) -> None:
    found = differences(*two)
    assert found["config"] == [("algorithm.beta", 0.1, 0.2)]
    assert found["packages"] == [("torch", "2.13.0", "2.13.1")]
    assert (found["code"], found["data"], found["machine"], found["other"]) == ([], [], [], [])
    assert ("val/accuracy", 0.5, 0.75) in found["results"]


def test_the_table(two: tuple[Path, Path]) -> None:
    text = as_markdown(differences(*two), ("a", "b"))
    assert "| algorithm.beta | 0.1 | 0.2 |" in text
    assert "| val/accuracy | 0.5 | 0.75 | +0.25 |" in text
    assert "No difference in code, data, machine, environment." in text


def test_what_one_run_lacks_is_empty(two: tuple[Path, Path]) -> None:
    (two[1] / "manifest.json").unlink()
    found = differences(*two)
    assert found["packages"] == [("torch", "2.13.0", None)]
    assert "| torch | 2.13.0 |  |" in as_markdown(found, ("a", "b"))


def test_what_is_no_run_is_named(two: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"runs: .*nowhere cannot be compared, .*type runs="):
        differences(two[0], tmp_path / "nowhere")
    (two[1] / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"runs: .*b cannot be compared, JSONDecodeError"):
        differences(*two)
