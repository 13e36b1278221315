"""task=report through run.py: on folders as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

import run
from alignment.errors import ConfigError, UserError
from alignment.experiment.record import MetricsFile

FILES = {
    "report.html", "report.json", "runs.csv", "runs.parquet", "curves.csv", "curves.parquet", "settings.csv",
    "table.md", "table.tex", "learning_curves.png", "learning_curves.pdf", "factor_effects.png", "factor_effects.pdf",
}  # fmt: skip


def sweep(folder: Path) -> Path:
    for number, (beta, seed) in enumerate([(0.1, 1), (0.1, 2), (0.3, 1), (0.3, 2)]):
        place = folder / str(number)
        place.mkdir(parents=True)
        config = {"task": {"_target_": "alignment.task.fit.run"}, "algorithm": {"beta": beta}, "seed": seed}
        (place / "config.yaml").write_text(yaml.safe_dump(config))
        MetricsFile(place).append(1, "val", {"val/accuracy": beta + seed / 100})
        (place / "summary.json").write_text(json.dumps({"val/accuracy": beta + seed / 100}))
    return folder


def test_a_sweep_becomes_tables_figures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = sweep(tmp_path / "sweep")
    (place / "3" / "summary.json").unlink()
    result = run.run(["task=report", f"runs={place}", f"output_dir={tmp_path / 'report'}"])
    assert {path.name for path in (tmp_path / "report").iterdir()} >= FILES
    assert (result["best"], result["num_runs"], result["num_left_out"]) == ("beta=0.3", 4, 1)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["mean"] == pytest.approx(0.31)
    said = capsys.readouterr().out
    assert "| beta | seeds | val/accuracy |" in said
    assert "sweep/3 is left out: unfinished" in said


def test_a_run_without_the_metric_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = sweep(tmp_path / "sweep")
    (place / "0" / "summary.json").write_text(json.dumps({"val/loss": 0.5}))
    result = run.run(["task=report", f"runs={place}", f"output_dir={tmp_path / 'report'}", "task.metric=val/accuracy"])
    assert result["num_left_out"] == 1
    assert "sweep/0 is left out: done (it has not measured val/accuracy)" in capsys.readouterr().out
    assert "it has not measured val/accuracy" in (tmp_path / "report" / "report.html").read_text()
    reasons = pd.read_csv(tmp_path / "report" / "runs.csv")["reason"].tolist()
    assert [isinstance(reason, str) for reason in reasons] == [True, False, False, False]


def test_several_places_and_a_chosen_baseline(tmp_path: Path) -> None:
    places = [sweep(tmp_path / "a"), sweep(tmp_path / "b")]
    words = ["task=report", f"runs=[{places[0]},{places[1]}]", "task.baseline='beta=0.3'", "task.formats=[svg]"]
    result = run.run([*words, f"output_dir={tmp_path / 'report'}"])
    assert (result["baseline"], result["num_runs"], result["num_settings"]) == ("beta=0.3", 8, 2)
    assert (tmp_path / "report" / "learning_curves.svg").exists()
    assert not (tmp_path / "report" / "learning_curves.png").exists()


def test_what_cannot_be_reported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs: task=report reads runs .*type runs="):
        run.run(["task=report", f"output_dir={tmp_path / '1'}"])
    with pytest.raises(ConfigError, match=r"runs: .* is read by a report only: type task=report"):
        run.run([f"runs={tmp_path}", f"output_dir={tmp_path / '2'}"])
    with pytest.raises(UserError, match=r"runs: there is no folder .*nowhere"):
        run.run(["task=report", f"runs={tmp_path}/nowhere", f"output_dir={tmp_path / '3'}"])
    with pytest.raises(UserError, match=r"task.level: 95 .*type task.level=0.95"):
        run.run(["task=report", f"runs={sweep(tmp_path / 's')}", f"output_dir={tmp_path / '4'}", "task.level=95"])


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = sweep(tmp_path / "sweep")
    words = ["task=compare", f"output_dir={tmp_path / 'compare'}"]
    assert run.run([*words, f"runs=[{place}/0,{place}/2]"])["differences"]["config"] == 1
    assert "| algorithm.beta | 0.1 | 0.3 |" in capsys.readouterr().out
    assert "algorithm.beta" in (tmp_path / "compare" / "compare.md").read_text()
    with pytest.raises(UserError, match=r"runs: task=compare takes two runs, got 1: type runs="):
        run.run(["task=compare", f"output_dir={tmp_path / 'one'}", f"runs={place}/0"])
