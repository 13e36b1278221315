"""`algorithm=rso data=rso`: from scored samples in a file to a trained model."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import run

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {a} + 1?"}], "completions": [str(a + b) for b in range(4)]}
    for a in range(20)
]
SMALL = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
SMALL += ["algorithm.max_steps=2", "algorithm.batch_size=4", "algorithm.microbatch_size=2", "data.heldout=4"]


def test_scored_samples_are_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "scored.jsonl"  # as task=score writes it: null = could not be scored
    path.write_text("".join(json.dumps(row | {"scores": [0.0, 1.0, None, 0.2]}) + "\n" for row in ROWS))
    words = [f"output_dir={tmp_path / 'run'}", "algorithm=rso", "data=rso", f"data.path={path}", *SMALL]
    summary = run.run(words)
    assert summary["steps"] == 2
    with open(tmp_path / "run" / "metrics.csv") as file:
        first = next(row for row in csv.DictReader(file) if row["phase"] == "train")
    assert float(first["train/loss"]) == pytest.approx(1, abs=1e-6)  # hinge where policy = reference
