"""pipeline=<name>: stages that start from each other, checked together, never run twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import run
from alignment.errors import ConfigError, UserError

ROOT = Path(run.__file__).parent
PIPELINES = sorted((ROOT / "conf" / "pipeline").glob("*.yaml"))
QUICK = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "rollout.max_new_tokens=4"]
QUICK += ["evaluation.num_prompts=4", "evaluation.num_samples=1"]
# The untrained model is never right: what is sampled is paid by its digits where a stage needs rewards that differ.
DIGITS = f"reward.function.path={ROOT / 'tests' / 'run' / 'rewards.py'}:digits"
ONLINE = ["num_rollouts=1", "num_prompts=2", "group_size=4", "microbatch_size=8"]
OFFLINE = ["max_steps=1", "batch_size=4", "microbatch_size=4"]


def small(file: Path) -> list[str]:
    """Words that make every stage of a pipeline a step or two."""
    words = []
    for name, stage in yaml.safe_load(file.read_text())["stages"].items():
        algorithm = next((word.split("=")[1] for word in stage if word.startswith("algorithm=")), None)
        keys = [] if algorithm is None else ONLINE if algorithm in ("grpo", "ppo", "raft") else OFFLINE
        words += [f"pipeline.{name}.algorithm.{key}" for key in keys]
        if algorithm == "raft":
            words.append(f"pipeline.{name}.algorithm.microbatch_size=2")
        if algorithm is None:  # nothing is right: keep what there is
            words += [f"pipeline.{name}.task.min_score=null", f"pipeline.{name}.rollout.max_new_tokens=8"]
            words = [word for word in words if "min_score" not in word or any("min_score" in w for w in stage)]
        if not any(word.startswith("reward=") for word in stage):
            words += [f"pipeline.{name}.reward=function", f"pipeline.{name}.{DIGITS}"]
    return words


def start(folder: Path, *words: str) -> dict[str, Any]:
    return run.run([*QUICK, f"output_dir={folder}", *words])


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_every_pipeline_runs_and_tells_of_its_stages(file: Path, tmp_path: Path) -> None:
    plan = yaml.safe_load(file.read_text())
    results = start(tmp_path / "p", f"pipeline={file.stem}", *small(file))
    assert list(results) == [*plan["stages"], "output_dir"]
    report = (tmp_path / "p" / "report.md").read_text()
    assert all(f"| {name} |" in report for name in plan["stages"])
    assert plan["full_scale"].strip() in report
    assert (tmp_path / "p" / "stages.png").stat().st_size > 5000
    folders = sorted(folder.name for folder in (tmp_path / "p").iterdir() if folder.is_dir())
    assert folders == [f"{number}_{name}" for number, name in enumerate(plan["stages"], 1)]
    adapters = [folder / "model" / "adapter_model.safetensors" for folder in (tmp_path / "p").iterdir()]
    assert any(path.is_file() for path in adapters)


ZEPHYR = ["pipeline=zephyr", *(f"pipeline.{name}.algorithm.{key}" for name in ("sft", "dpo") for key in OFFLINE)]
ZEPHYR += ["pipeline.dpo.algorithm.max_steps=4", "checkpoint.every=1"]


def test_a_stage_starts_from_the_one_before_it(tmp_path: Path) -> None:
    start(tmp_path / "p", *ZEPHYR, "pipeline.dpo.algorithm.lr=1e-12")
    one, two = (load_file(tmp_path / "p" / name / "model" / "adapter_model.safetensors") for name in ("1_sft", "2_dpo"))
    assert all(torch.allclose(one[name], two[name], atol=1e-9) for name in one)
    assert any(one[name].abs().max() > 0 for name in one if "lora_B" in name)
    config = yaml.safe_load((tmp_path / "p" / "2_dpo" / "config.yaml").read_text())
    assert config["algorithm"]["lr"] == 1e-12
    assert config["model"]["adapter_path"] == str(tmp_path / "p" / "1_sft" / "model")


def test_a_killed_pipeline_goes_on_in_its_stage_and_repeats_none(tmp_path: Path) -> None:
    start(tmp_path / "whole", *ZEPHYR)
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "run.py", *QUICK, f"output_dir={folder}", *ZEPHYR, "pipeline.dpo.algorithm.max_steps=400"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list((folder / "2_dpo" / "checkpoints").glob("*.ckpt")):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = int(next((folder / "2_dpo" / "checkpoints").glob("*.ckpt")).stem)
    first = (folder / "1_sft" / "model" / "adapter_model.safetensors").stat().st_mtime_ns
    record = json.loads((folder / "pipeline.json").read_text())
    text = (folder / "2_dpo" / "config.yaml").read_text()
    (folder / "2_dpo" / "config.yaml").write_text(text.replace("max_steps: 400", f"max_steps: {done + 1}"))

    results = run.run([f"resume={folder}"])
    assert (folder / "1_sft" / "model" / "adapter_model.safetensors").stat().st_mtime_ns == first
    assert results["dpo"]["steps"] == done + 1
    assert json.loads((folder / "pipeline.json").read_text()) == record
    start_again = run.run([f"resume={folder}"])  # all is done: nothing runs, the report is written again
    assert start_again == results
    with pytest.raises(ConfigError, match="goes on as it was started"):
        run.run([f"resume={folder}", "seed=2"])


def test_a_stage_that_fails_is_named_with_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    bad = ["pipeline.dpo.data=jsonl", f"pipeline.dpo.data.path={tmp_path / 'p' / '1_sft' / 'rows.jsonl'}"]
    with pytest.raises(UserError, match=f"stage dpo: (?s:.*)resume={folder}"):
        start(folder, *ZEPHYR, *bad)
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(8)]
    (folder / "1_sft" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.run([f"resume={folder}"])["dpo"]["steps"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipeline=zefyr"], ["pipeline: there is no 'zefyr': type pipeline=<one of"]),
        # of both stages at once
        (
            ["pipeline=zephyr", "pipeline.sft.algorithm.lr=0", "pipeline.dpo.algorithm.betta=1"],
            ["[stage sft] algorithm.lr: 0 must be more than 0", "[stage dpo] algorithm.betta: "],
        ),
        (
            ["pipeline=zephyr", "pipeline.rm.seed=1"],
            ["pipeline.rm.seed: there is no such stage: type pipeline.<one of sft"],
        ),
        (["-m", "pipeline=zephyr", "seed=1,2"], ["-m: a pipeline is one run after another"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_stage(tmp_path: Path, words: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        start(tmp_path / "p", *words)
    assert len(caught.value.problems) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(caught.value.problems, said, strict=True))
    assert not (tmp_path / "p").exists()


def test_a_folder_is_one_pipelines_own(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "pipeline.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a pipeline already: type resume="):
        start(tmp_path / "p", "pipeline=zephyr")


def test_help_shows_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    run.run(["--help", "pipeline=zephyr"])
    text = capsys.readouterr().out
    assert "1_sft" in text
    assert "model.adapter_path=1_sft/model" in text
    assert "At full scale: Mistral-7B" in text
