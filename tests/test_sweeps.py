"""The sweeps: each point of each is a run that is accepted, and the command without a server is the same grid."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment import config
from alignment.errors import ConfigError

SWEEPS = sorted((Path(__file__).parent.parent / "sweeps").glob("*.yaml"))


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def levels(sweep: dict[str, Any]) -> dict[str, list[Any]]:
    """What wandb's grid search runs over: the values of each parameter, one for a constant."""
    return {name: given.get("values", [given.get("value")]) for name, given in sweep["parameters"].items()}


def words(point: dict[str, Any]) -> list[str]:
    """wandb's ${args_no_hyphens}."""
    return [f"{name}={value}" for name, value in point.items()]


def corners(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """The first and the last value of each parameter, all together, and every value of each by itself."""
    given = levels(sweep)
    first = {name: values[0] for name, values in given.items()}
    last = {name: values[-1] for name, values in given.items()}
    return [first, last, *(first | {name: value} for name, values in given.items() for value in values[1:])]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_value_is_accepted(path: Path) -> None:
    sweep = read(path)
    with config.composer(config.parse([])) as session:
        for point in corners(sweep):
            job = session.job([*words(point), "logger=[csv,wandb]"], 0)
            assert job.problems == [], point


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_command_is_the_one_that_runs_here(path: Path) -> None:
    sweep = read(path)
    assert sweep["program"] == "run.py"
    assert sweep["command"] == ["${env}", "python", "${program}", "${args_no_hyphens}", "logger=[csv,wandb]"]
    assert sweep["metric"]["name"] in ("val/accuracy", "val/rewards/accuracies")
    assert sweep["method"] == "grid"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_line_without_a_server_is_the_same_grid(path: Path) -> None:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("# python run.py -m ")]
    typed = dict(word.split("=", 1) for word in shlex.split(line)[4:])
    given = levels(read(path))
    assert {name: value.split(",") for name, value in typed.items()} == {
        name: [str(value) for value in values] for name, values in given.items()
    }
    assert len(list(itertools.product(*given.values()))) >= 12


def test_a_wrong_value_would_be_noticed() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.beta: .*type algorithm.beta="):
        config.preflight(config.parse(words({"algorithm": "grpo", "algorithm.beta": -1})))
