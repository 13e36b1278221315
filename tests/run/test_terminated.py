"""SIGTERM: the run saves where it can go on from exactly, and ends with the code that schedulers know."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import run
from alignment.callbacks.checkpoint import last_checkpoint

ROOT = Path(run.__file__).parent
BASE = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "rollout.max_new_tokens=6"]
BASE += ["reward=function", f"reward.function.path={ROOT}/tests/run/rewards.py:digits", "evaluation.num_prompts=0"]
BASE += ["checkpoint.every=1000", "algorithm.microbatch_size=8"]
# Long enough to be met in the middle, and with several microbatches in each rollout and step.
GRPO = ["algorithm=grpo", "algorithm.num_rollouts=12", "algorithm.num_prompts=2", "algorithm.num_iterations=2"]
DPO = ["algorithm=dpo", "algorithm.max_steps=24", "algorithm.batch_size=16"]


def steps(folder: Path) -> list[int]:
    if not (folder / "metrics.csv").exists():
        return []
    with open(folder / "metrics.csv") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["phase"] == "train"]


@pytest.mark.parametrize(("algorithm", "num_steps"), [(GRPO, 24), (DPO, 24)], ids=["grpo", "dpo"])
def test_a_run_that_is_told_to_end_saves_and_goes_on_exactly(
    tmp_path: Path, algorithm: list[str], num_steps: int
) -> None:
    words, folder = [*BASE, *algorithm], tmp_path / "ended"
    command = [sys.executable, str(ROOT / "run.py"), *words, f"output_dir={folder}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while len(steps(folder)) < 3 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    done = steps(folder)
    assert 3 <= len(done) < num_steps
    saved = last_checkpoint(folder / "checkpoints")
    assert saved is not None and int(saved.stem) == done[-1]
    assert f"told to end (SIGTERM): saved at step {done[-1]}; go on with python run.py resume={folder}" in said
    run.run([f"resume={folder}"])
    run.run([*words, f"output_dir={tmp_path / 'whole'}"])
    assert steps(folder) == list(range(1, num_steps + 1))
    one, two = (load_file(path / "model" / "adapter_model.safetensors") for path in (folder, tmp_path / "whole"))
    assert all(torch.equal(one[name], two[name]) for name in one)
