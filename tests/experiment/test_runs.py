"""What a folder of runs is read as: how each ended, and in what they differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.experiment.runs import Run, curve_table, find_factors, find_runs, level, run_table, short_names


def with_config(**config) -> Run:
    return Run(Path(), "done", config={name.replace("__", "."): value for name, value in config.items()})


def test_runs_are_found_in_the_order_of_their_numbers(make_run, tmp_path: Path) -> None:
    for name in ("10", "2", "0"):
        make_run(name, {"seed": int(name)}, accuracy=0.5)
    assert [run.folder.name for run in find_runs([tmp_path])] == ["0", "2", "10"]
    assert [run.seed for run in find_runs([tmp_path / "sweep" / "2", tmp_path / "sweep"])] == [2, 0, 10]


def test_a_run_says_how_it_ended(make_run, tmp_path: Path) -> None:
    make_run("0", {"seed": 0}, accuracy=0.5)
    make_run("1", {"seed": 1}, accuracy=None)
    (make_run("2", {"seed": 2}, accuracy=0.5) / "error.txt").write_text("ValueError: seed two\n\nTraceback")
    (make_run("3", {"seed": 3}, accuracy=0.5) / "config.yaml").write_text("a: [")
    (make_run("4", {"seed": 4}, accuracy=0.5) / "summary.json").write_text('{"val/')
    (make_run("5", {"seed": 5}, accuracy=0.5) / "metrics.csv").write_text("what,is,this\n")
    runs = find_runs([tmp_path])
    assert [run.status for run in runs] == ["done", "unfinished", "failed", "broken", "broken", "broken"]
    assert runs[2].reason == "ValueError: seed two"
    assert "metrics.csv" in runs[5].reason


def test_folders_of_other_tasks_are_no_runs(make_run, tmp_path: Path) -> None:
    make_run("0", {"seed": 0}, accuracy=0.5)
    report = make_run("report", {"task._target_": "alignment.task.report.run"}, accuracy=None)
    assert report.exists()
    assert [run.folder.name for run in find_runs([tmp_path])] == ["0"]


@pytest.mark.parametrize("place", ["nowhere", ""])
def test_no_runs_is_an_error_that_names_the_place(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError, match=r"runs: .*type runs="):
        find_runs([tmp_path / place])


def test_factors_are_what_was_swept() -> None:
    runs = [
        with_config(algorithm__beta=beta, seed=seed, output_dir=str((beta, seed)))
        for beta in (0, 0.1)
        for seed in (1, 2)
    ]
    assert find_factors(runs) == ["algorithm.beta"]


def test_what_follows_from_the_chosen_option_is_no_factor() -> None:
    dpo = {"algorithm___target_": "alignment.algorithm.dpo.DPO", "algorithm__loss": "sigmoid", "algorithm__wpo": False}
    simpo = {"algorithm___target_": "alignment.algorithm.simpo.SimPO", "algorithm__gamma_beta_ratio": 0.5}
    runs = [with_config(**option, algorithm__beta=beta) for option in (dpo, simpo) for beta in (0.1, 0.5)]
    assert find_factors(runs) == ["algorithm._target_", "algorithm.beta"]
    alone = [with_config(**dpo, algorithm__beta=0.1), with_config(**simpo, algorithm__beta=2.5)]
    assert find_factors(alone) == ["algorithm._target_"]


def test_a_random_search_keeps_every_number() -> None:
    runs = [with_config(algorithm__lr=lr, algorithm__beta=beta) for lr, beta in ((1e-4, 0.1), (2e-4, 0.3), (3e-4, 0.2))]
    assert find_factors(runs) == ["algorithm.lr", "algorithm.beta"]


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names(["algorithm.beta", "optimizer.lr", "algorithm.lr", "algorithm._target_"]) == {
        "algorithm.beta": "beta", "optimizer.lr": "optimizer.lr", "algorithm.lr": "algorithm.lr",
        "algorithm._target_": "algorithm",
    }  # fmt: skip
    assert (level("alignment.algorithm.dpo.DPO"), level(None), level(0.1)) == ("DPO", "null", 0.1)


def test_tables_have_a_row_per_run_and_per_step(make_run, tmp_path: Path) -> None:
    make_run("0", {"algorithm.beta": 0.1, "seed": 1}, accuracy=0.5)
    make_run("1", {"algorithm.beta": 0.2, "seed": 1}, accuracy=0.7)
    make_run("2", {"algorithm.beta": 0.2, "seed": 2}, accuracy=None)
    runs = find_runs([tmp_path])
    table = run_table(runs, ["algorithm.beta"])
    assert table[["beta", "seed", "status"]].values.tolist() == [
        [0.1, 1, "done"],
        [0.2, 1, "done"],
        [0.2, 2, "unfinished"],
    ]
    assert table["val/accuracy"].tolist()[:2] == [0.5, 0.7]
    assert "output_dir" not in table
    curves = curve_table(runs[:2], ["algorithm.beta"])
    assert curves["val/accuracy"].tolist() == [0.0, 0.25, 0.5, 0.0, 0.35, 0.7]
