"""Every experiment composes as it stands, and runs where its model and data are exchanged for small ones."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

import run
from alignment import config
from alignment.validate import validate

CONF = Path(run.__file__).parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
SMALL = ["model=tiny", "data=arithmetic", "trainer.precision=32-true", "trainer.enable_progress_bar=false"]
SMALL += ["algorithm.max_steps=2", "algorithm.batch_size=4", "algorithm.microbatch_size=2", "algorithm.warmup_ratio=0"]


def test_there_are_experiments() -> None:
    assert {"zephyr", "tulu3_dpo", "simpo_llama3", "simpo_mistral", "orpo", "kto", "tr_dpo"} <= set(EXPERIMENTS)


def test_each_is_accepted_as_it_stands() -> None:
    """Names, types, numbers and combinations; nothing is loaded."""
    with config.composer(config.parse([])) as session:
        for name in EXPERIMENTS:
            cfg, whole, problems, _ = session.settle([f"experiment={name}"])
            assert cfg is not None, problems
            assert whole is not None
            config._place(whole, None)
            plain, more = config.resolve(cfg)
            assert problems + more + validate(plain) == [], name
            assert plain["model"]["path"] != "???"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_says_where_its_numbers_come_from(name: str) -> None:
    first, what, source = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:3]
    assert first == "# @package _global_"
    assert "(2" in what, "the paper"
    assert source.startswith("# Numbers: ")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_runs_on_small_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    summary = run.run([f"output_dir={tmp_path / 'run'}", f"experiment={name}", *SMALL])
    assert summary["steps"] == 2
    assert math.isfinite(summary["val/loss"])
    with open(tmp_path / "run" / "metrics.csv") as file:
        steps = [row for row in csv.DictReader(file) if row["phase"] == "train"]
    first = float(steps[0]["train/loss"])
    if name in ("zephyr", "tr_dpo", "tulu3_dpo"):  # policy = reference: log 2
        assert first == pytest.approx(math.log(2), abs=1e-6)
