"""Two processes take the steps that one takes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "model=tiny",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "evaluation.num_prompts=0",
    "algorithm.max_steps=3",
    "algorithm.batch_size=8",
    "algorithm.microbatch_size=2",
]


def curve(folder: Path, *words: str) -> torch.Tensor:
    """Loss and gradient norm of every step."""
    command = [sys.executable, "run.py", f"output_dir={folder}", *WORDS, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(folder / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "train"]
    return torch.tensor([[float(row["train/loss"]), float(row["train/grad_norm"])] for row in rows])


@pytest.mark.parametrize("algorithm", ["dpo", "sft"])
def test_two_processes_equal_one(tmp_path: Path, algorithm: str) -> None:
    """Rows of different lengths; each step's mean is over both processes' tokens or pairs."""
    one = curve(tmp_path / "one", f"algorithm={algorithm}")
    two = curve(tmp_path / "two", f"algorithm={algorithm}", "trainer.devices=2")
    assert len(one) == len(two) == 3
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(two[0], one[0], rtol=1e-5, atol=1e-7)
