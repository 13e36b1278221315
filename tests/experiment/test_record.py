"""The files of a run's folder: what is in them, what survives a kill, and what a resumed run finds."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from alignment.errors import UserError
from alignment.experiment import record
from alignment.experiment.record import (
    MetricsFile,
    Samples,
    git_state,
    plain,
    without_secrets,
    write_manifest,
    write_summary,
)


# ---- plain values -------------------------------------------------------------------------------------------------
def test_values_of_libraries_become_plain_ones() -> None:
    given = {
        "path": Path("a/b"),
        "array": np.array([1, 2]),
        "scalar": np.float32(0.5),
        "tensor": torch.tensor(3),
        4: (1,),
    }
    assert plain(given, "x") == {"path": "a/b", "array": [1, 2], "scalar": 0.5, "tensor": 3, "4": [1]}


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match=r"config\.model\.dtypes\[1\] is a dtype"):
        plain({"model": {"dtypes": ["bf16", torch.bfloat16]}}, "config")


# ---- manifest.json -------------------------------------------------------------------------------------------------
@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "first")
    return tmp_path


def test_the_state_of_the_code(repository: Path) -> None:
    clean = git_state(repository)
    assert clean is not None
    commit = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert clean == {"commit": commit.strip(), "branch": "main", "dirty": False, "uncommitted_sha256": None}
    (repository / "ignored").write_text("1")
    assert git_state(repository) == clean

    states = []
    for name, text in (("a.py", "x = 2\n"), ("new.py", "y = 1\n"), ("new.py", "y = 2\n"), ("a.py", "x = 1\n")):
        (repository / name).write_text(text)
        states.append(git_state(repository))
    assert all(state is not None and state["dirty"] and state["commit"] == clean["commit"] for state in states)
    assert len({state["uncommitted_sha256"] for state in states if state}) == 4


def test_no_git_no_state(tmp_path: Path, repository: Path) -> None:
    (repository / "inside").mkdir()
    assert git_state(repository / "inside") is None  # another project's checkout says nothing about us
    assert git_state(tmp_path.parent) is None


def test_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "run.py", "algorithm=grpo", "+api_key=hunter2", "name=a b"])
    text = write_manifest(tmp_path, seed=3, data={"train": "5 examples"}).read_text()
    manifest = json.loads(text)
    assert manifest["command"] == "python run.py algorithm=grpo '+api_key=***' 'name=a b'"
    assert (manifest["seed"], manifest["data"]) == (3, {"train": "5 examples"})
    assert manifest["packages"]["torch"] == torch.__version__
    assert manifest["machine"]["num_threads"] == torch.get_num_threads()
    assert manifest["machine"]["cpu"]
    assert manifest["environment"]["OMP_NUM_THREADS"] == "1"
    assert "hunter2" not in text


def test_a_resumed_run_keeps_the_record_of_its_first_start(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_manifest(tmp_path, seed=seed, data={})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 1
    assert [later["seed"] for later in manifest["resumed"]] == [2, 3]


@pytest.mark.parametrize(
    "word",
    [
        "api_key=x",
        "+api_key=x",
        "WANDB_API_KEY=x",
        "logger.wandb.api_key=x",
        "++a.hf_token=x",
        "--token=x",
        "db.password=x",
    ],
)
def test_secrets_on_the_command_line_are_hidden(word: str) -> None:
    assert without_secrets([word]) == [word[:-1] + "***"]


@pytest.mark.parametrize(
    "word", ["rollout.max_new_tokens=12", "model.tokenizer=x", "model.pad_token=x", "encoding.max_prompt_tokens=5", "x"]
)
def test_ordinary_settings_are_not(word: str) -> None:
    assert without_secrets([word]) == [word]


# ---- summary.json --------------------------------------------------------------------------------------------------
def test_the_summary_is_valid_json_whatever_the_metrics(tmp_path: Path) -> None:
    path = write_summary(
        tmp_path, {"val/accuracy": np.float32(0.5), "train/loss": float("nan"), "steps": 3, "dir": tmp_path}
    )
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "val/accuracy": 0.5,
        "train/loss": None,
        "steps": 3,
        "dir": str(tmp_path),
    }


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, {"a": 1})
    monkeypatch.setattr(record.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_summary(tmp_path, {"a": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


# ---- metrics.csv ---------------------------------------------------------------------------------------------------
def test_rows_by_step_and_phase_on_disk_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.append(0, "val", {"val/accuracy": 0.25})
    file.append(1, "train", {"train/loss": 1e-07, "train/kl": torch.tensor(0.5)})
    file.append(2, "train", {"train/loss": 2})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,phase,val/accuracy,train/loss,train/kl",
        "0,val,0.25,,",
        "1,train,,1e-07,0.5",
        "2,train,,2.0,",
    ]
    assert MetricsFile(tmp_path).read() == [
        {"step": 0, "phase": "val", "val/accuracy": 0.25},
        {"step": 1, "phase": "train", "train/loss": 1e-07, "train/kl": 0.5},
        {"step": 2, "phase": "train", "train/loss": 2.0},
    ]


def test_values_come_back_exactly(tmp_path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": -1e-300, "c": float("inf"), "d": 123456789.0, 'odd, "name"': 1 / 3}
    file = MetricsFile(tmp_path)
    file.append(5, "train", values | {"nan": float("nan")})
    [row] = file.read()
    assert math.isnan(row.pop("nan"))
    assert row == {"step": 5, "phase": "train", **values}


def test_a_plain_csv_reader_reads_it(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.append(1, "train", {"a": 1.0})
    file.append(1, "val", {"b, c": 2.0})
    with (tmp_path / "metrics.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert rows == [
        {"step": "1", "phase": "train", "a": "1.0", "b, c": ""},
        {"step": "1", "phase": "val", "a": "", "b, c": "2.0"},
    ]


def test_what_belongs_to_the_same_step_and_phase_is_one_row(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.append(1, "train", {"a": 1.0, "b": 1.0})
    file.append(1, "train", {"b": 22.5})  # the last row
    file.append(1, "val", {"c": 3.0})
    file.append(1, "train", {"d": 4.0})  # not the last any more, and a new column
    file.append(1, "val", {"c": 5.0})
    file.append(2, "train", {"a": 6.0})
    file.append(1, "train", {"a": 7.0})  # of an earlier step
    assert file.read() == [
        {"step": 1, "phase": "train", "a": 7.0, "b": 22.5, "d": 4.0},
        {"step": 1, "phase": "val", "c": 5.0},
        {"step": 2, "phase": "train", "a": 6.0},
    ]


def test_a_merged_row_that_is_shorter_leaves_no_rest(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.append(1, "train", {"a": 1.2345678901234})
    file.append(1, "train", {"a": 1.0})
    file.append(2, "train", {"a": 2.0})
    assert [row["a"] for row in file.read()] == [1.0, 2.0]


def test_a_resumed_run_goes_on_without_gap_or_repeat(tmp_path: Path) -> None:
    before = MetricsFile(tmp_path)
    for step in range(1, 8):
        before.append(step, "train", {"loss": float(step)})
    MetricsFile(tmp_path).truncate_after(5)
    after = MetricsFile(tmp_path)
    for step in range(6, 11):
        after.append(step, "train", {"loss": float(step), "new": 0.0})
    assert [(row["step"], row["loss"]) for row in after.read()] == [(step, float(step)) for step in range(1, 11)]


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    first, second = MetricsFile(tmp_path), MetricsFile(tmp_path)
    first.append(1, "train", {"a": 1.0})
    second.append(2, "train", {"b": 2.0})
    first.append(3, "train", {"a": 3.0})
    second.truncate_after(1)
    first.append(2, "train", {"a": 22.0})
    assert first.read() == [
        {"step": 1, "phase": "train", "a": 1.0},
        {"step": 2, "phase": "train", "a": 22.0},
    ]


@pytest.mark.parametrize("torn", ["2,tra", "2,train,3.", "2,train,3.25"])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, torn: str) -> None:
    """Without its newline nobody knows whether 3.25 was 3.256."""
    (tmp_path / "metrics.csv").write_text(f"step,phase,a\n1,train,1.0\n{torn}")
    file = MetricsFile(tmp_path)
    assert file.read() == [{"step": 1, "phase": "train", "a": 1.0}]
    file.append(2, "train", {"a": 2.0})
    assert file.read() == [{"step": 1, "phase": "train", "a": 1.0}, {"step": 2, "phase": "train", "a": 2.0}]


def test_truncating_everything_or_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.truncate_after(3)
    assert file.read() == []
    file.append(1, "train", {"a": 1.0})
    file.truncate_after(1)
    assert len(file.read()) == 1
    file.truncate_after(0)
    assert file.read() == []
    file.append(1, "train", {"a": 2.0})
    assert file.read() == [{"step": 1, "phase": "train", "a": 2.0}]


@pytest.mark.parametrize("value", ["1.0", None, torch.zeros(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path: Path, value) -> None:
    with pytest.raises(TypeError, match=r"metric 'a' is .*, not a number"):
        MetricsFile(tmp_path).append(1, "train", {"a": value})


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(UserError, match="does not begin with the columns step and phase"):
        MetricsFile(tmp_path).append(1, "train", {"a": 1.0})
    assert (tmp_path / "metrics.csv").read_text() == "epoch,loss\n1,2\n"


# ---- samples.jsonl -------------------------------------------------------------------------------------------------
def sample(step: int, **more) -> dict:
    return {"step": step, "phase": "rollout", "prompt": "p", "completion": "ü\n\u2028", "reward": 1.0} | more


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    samples.append([sample(1, parts={"accuracy": None}, advantage=-0.5), sample(1, reward=float("nan"))])
    samples.append([sample(2, prompt=[{"role": "user", "content": "q"}])])
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 4
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines[:3]] == [1, 1, 2]
    first, second, third = samples.read()
    assert first == sample(1, parts={"accuracy": None}, advantage=-0.5)
    assert second["reward"] is None
    assert third["prompt"] == [{"role": "user", "content": "q"}]


def test_samples_after_a_resume(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    samples.truncate_after(3)
    samples.append([sample(step) for step in (1, 2, 2, 3)])
    samples.truncate_after(2)
    Samples(tmp_path).append([sample(3, completion="again")])
    assert [(row["step"], row["completion"]) for row in samples.read()][-2:] == [(2, "ü\n\u2028"), (3, "again")]
    assert len(list(samples.read())) == 4


@pytest.mark.parametrize("kept", [0, 1])
def test_a_sample_that_was_cut_off_is_dropped(tmp_path: Path, kept: int) -> None:
    samples = Samples(tmp_path)
    samples.append([sample(1)] * kept)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(json.dumps(sample(2, completion="x" * 200_000)).encode()[:-1])
    assert len(list(samples.read())) == kept
    samples.append([sample(2)])
    assert [row["step"] for row in samples.read()] == [1] * kept + [2]


def test_half_a_character_does_not_end_the_run(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    samples.append([sample(1, completion="a\ud83d")])
    assert [row["completion"] for row in samples.read()] == ["a?"]


def test_a_sample_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['step'\]"):
        Samples(tmp_path).append([{"phase": "val", "completion": "x"}])
