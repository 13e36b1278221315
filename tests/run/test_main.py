"""What run.py does around a task, in this process: folders, exit codes, messages, sweeps, resume."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from alignment.errors import UserError


def seen(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "seen0.json").read_text())


def test_a_run_returns_its_objective_and_stays_in_its_folder(
    run_py: ModuleType, toy: list[str], tmp_path: Path
) -> None:
    assert run_py.run([*toy, "seed=1", "task.word=x", "output_dir=out"]) == {"score": 1.0}
    found = seen(tmp_path / "out")
    assert (found["cwd"], found["config"], found["word"]) == (str(tmp_path), True, "x")
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (saved["seed"], saved["output_dir"], saved["task"]["word"]) == (1, str(tmp_path / "out"), "x")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"conf", "toy_task.py", "out"}


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_paths_mean_the_folder_of_the_launch(
    run_py: ModuleType, toy: list[str], tmp_path: Path, chdir: str
) -> None:
    run_py.run([*toy, f"hydra.job.chdir={chdir}", "output_dir=deep/er"])
    assert seen(tmp_path / "deep" / "er")["cwd"] == str(tmp_path)
    assert Path.cwd() == tmp_path


def test_further_ranks_would_start_this_job(run_py: ModuleType, toy: list[str], tmp_path: Path) -> None:
    """Lightning replays sys.argv: it names the resolved config, and the environment is as before for the next job."""
    before = list(sys.argv)
    run_py.run([*toy, "-m", "seed=1,4", "output_dir=out"])
    for number in ("0", "1"):
        argv = seen(tmp_path / "out" / number)["argv"]
        assert argv[1:] == ["--job", str(tmp_path / "out" / number / "config.yaml")]
        assert argv[0].endswith("run.py")
    assert sys.argv == before
    assert "LOCAL_RANK" not in os.environ
    assert "MASTER_PORT" not in os.environ


def test_a_saved_job_runs_without_hydra(run_py: ModuleType, toy: list[str], tmp_path: Path) -> None:
    run_py.run([*toy, "seed=1", "output_dir=out"])
    assert run_py.main(["--job", "out/config.yaml"]) == 0
    assert json.loads((tmp_path / "out" / "objective.json").read_text()) == {"score": 1.0}


def test_a_further_rank_leaves_no_result(
    run_py: ModuleType, toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_py.run([*toy, "seed=1", "output_dir=out"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_py.main(["--job", "out/config.yaml"]) == 0
    assert not (tmp_path / "out" / "objective.json").exists()
    assert (tmp_path / "out" / "seen1.json").exists()


# ---- exit codes and messages ---------------------------------------------------------------------------------------
def test_the_users_errors_are_a_message(run_py: ModuleType, toy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_py.main([*toy, "seed=3"]) == 1
    assert capsys.readouterr().err.strip() == "error: seed: 3 is not for this task: type seed=4"


def test_debug_shows_their_traceback(run_py: ModuleType, toy: list[str]) -> None:
    with pytest.raises(UserError, match="seed: 3"):
        run_py.main([*toy, "seed=3", "debug=true"])


def test_other_errors_keep_their_traceback(run_py: ModuleType, toy: list[str]) -> None:
    with pytest.raises(ValueError, match="seed two") as caught:
        run_py.main([*toy, "seed=2"])
    assert "toy_task.py" in str(caught.traceback[-1].path)


@pytest.mark.parametrize("seed", [5, 6], ids=["Ctrl-C", "Ctrl-C inside Lightning's fit"])
def test_ctrl_c_says_how_to_go_on(
    run_py: ModuleType, toy: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, seed: int
) -> None:
    assert run_py.main([*toy, f"seed={seed}", "output_dir=early"]) == 130
    assert "before the first checkpoint" in capsys.readouterr().err
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "00000001.ckpt").touch()
    assert run_py.main([*toy, f"seed={seed}", "output_dir=out"]) == 130
    assert f"python run.py resume={tmp_path / 'out'}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_refusal_is_exit_code_2_and_starts_nothing(
    run_py: ModuleType, toy: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_py.main([*toy, "algorithm.betta=1", "task.wrod=3", "output_dir=out"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("2 problems; nothing was started:\n  - algorithm.betta: ")
    assert "type task.word=3" in text
    assert not (tmp_path / "out").exists()


def test_a_folder_taken_in_the_meantime_is_not_written_into(
    run_py: ModuleType, toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs started at once may both find the folder free: the second to write is told."""
    plan = run_py.config.preflight(run_py.config.parse([*toy, "output_dir=out"]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("mine")
    with pytest.raises(UserError, match="was taken by another run: type output_dir="):
        run_py.config.launch(plan)
    assert (tmp_path / "out" / "config.yaml").read_text() == "mine"


# ---- sweeps ----------------------------------------------------------------------------------------------------------
def test_a_failing_job_is_recorded_and_the_others_go_on(
    run_py: ModuleType, toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_py.main([*toy, "-m", "seed=1,2,9,3,4", "output_dir=out"]) == 1
    text = capsys.readouterr().err
    summary = text[text.index("error: ") :].splitlines()
    assert summary[0] == f"error: 3 of 5 jobs failed, the others are done, in {tmp_path / 'out'}:"
    assert [line.split("  (")[0] for line in summary[1:]] == [
        "  1: ValueError: seed two",
        "  2: SystemExit: gone",
        "  3: UserError: seed: 3 is not for this task: type seed=4",
    ]
    assert 'raise ValueError("seed two' in (tmp_path / "out" / "1" / "error.txt").read_text()
    assert all((tmp_path / "out" / str(number) / "seen0.json").exists() for number in range(5))


def test_a_key_that_the_default_option_lacks_can_be_set_for_all_jobs_of_a_sweep(
    run_py: ModuleType, toy: list[str], tmp_path: Path
) -> None:
    """Hydra alone composes it with the default algorithm first, which has no batch_size."""
    fixed = ["algorithm.batch_size=24", "optimizer.betas=[0.8,0.9]", "data.question='{a} {op} {b}, please'"]
    run_py.main([*toy, "-m", "algorithm=dpo,ipo", "algorithm.beta=0.2,0.3", *fixed, "seed=1", "output_dir=out"])
    saved = [yaml.safe_load((tmp_path / "out" / str(job) / "config.yaml").read_text()) for job in range(4)]
    assert [cfg["algorithm"]["batch_size"] for cfg in saved] == [24] * 4
    assert [(cfg["algorithm"]["loss"], cfg["algorithm"]["beta"]) for cfg in saved] == [
        ("sigmoid", 0.2), ("sigmoid", 0.3), ("ipo", 0.2), ("ipo", 0.3),
    ]  # fmt: skip
    assert saved[0]["optimizer"]["betas"] == [0.8, 0.9]
    assert saved[0]["data"]["question"] == "{a} {op} {b}, please"


def test_a_sweep_returns_its_objectives_in_order(run_py: ModuleType, toy: list[str]) -> None:
    assert run_py.run([*toy, "-m", "seed=4,1"]) == [{"score": 4.0}, {"score": 1.0}]


def test_sweepers_are_given_nan_for_a_failed_job(
    run_py: ModuleType, toy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an optimising sweeper marks the trial as failed and goes on."""
    returned: list[Any] = []
    run_hydra = run_py.config._run_hydra

    def spy(flags: Any, parser: Any, job: Any, *rest: Any) -> None:
        def spied(cfg: Any) -> Any:
            returned.append(job(cfg))
            return returned[-1]

        run_hydra(flags, parser, spied, *rest)

    monkeypatch.setattr(run_py.config, "_run_hydra", spy)
    assert run_py.main([*toy, "-m", "seed=1,2"]) == 1
    assert returned[0] == {"score": 1.0}
    assert math.isnan(returned[1])


def test_jobs_of_several_ranks_outlive_each_other(
    run_py: ModuleType, toy: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With two devices each job is a process of its own: one that is killed takes no other with it."""
    words = ["trainer.devices=2", "algorithm.microbatch_size=8", "output_dir=out"]
    assert run_py.main([*toy, "-m", "seed=1,8,2,4", *words]) == 1
    text = capfd.readouterr().err
    assert "2 of 4 jobs failed" in text
    assert "1: UserError: the job's process ended with code -9" in text
    assert "2: ValueError: seed two" in text
    for number, score in (("0", 1.0), ("3", 4.0)):
        assert json.loads((tmp_path / "out" / number / "objective.json").read_text()) == {"score": score}


def test_ctrl_c_ends_the_whole_sweep(run_py: ModuleType, toy: list[str], tmp_path: Path) -> None:
    assert run_py.main([*toy, "-m", "seed=1,5,4", "output_dir=out"]) == 130
    assert not (tmp_path / "out" / "2").exists()


# ---- resume ----------------------------------------------------------------------------------------------------------
def test_a_resumed_run_starts_from_its_saved_config(run_py: ModuleType, toy: list[str], tmp_path: Path) -> None:
    assert run_py.main([*toy, "-m", "seed=2", "output_dir=out", "algorithm.num_rollouts=7"]) == 1
    job = tmp_path / "out" / "0"
    (job / "checkpoints").mkdir()
    (job / "checkpoints" / "00000001.ckpt").touch()
    for folder in ("model", "algorithm"):  # folders of a run are no groups
        (job / folder).mkdir()
    assert run_py.run(["resume=out/0", "seed=4"]) == {"score": 4.0}
    saved = yaml.safe_load((job / "config.yaml").read_text())
    # what is typed reaches the task; it is written by a task that goes on, which this one never says
    assert (saved["seed"], saved["algorithm"]["num_rollouts"], saved["resume"]) == (2, 7, None)
    assert not (job / "error.txt").exists()
    assert run_py.run([f"resume={job}", "seed=4"]) == {"score": 4.0}
