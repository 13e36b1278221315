"""Two processes take the steps that one takes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

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


@pytest.mark.parametrize("algorithm", [["kto"], ["bco", "algorithm.density_ratio=[0.5,10]"]])
def test_what_is_measured_over_a_step_is_of_both_processes(tmp_path: Path, algorithm: list[str]) -> None:
    """KTO's z0 and BCO's shift move within three steps of a large learning rate; the curves would come apart."""
    words = [f"algorithm={algorithm[0]}", *algorithm[1:], "algorithm.lr=3e-2"]
    one, two = (curve(tmp_path / str(n), *words, f"trainer.devices={n}") for n in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    measured = []
    for n in (1, 2):
        with open(tmp_path / str(n) / "metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["phase"] == "train"]
        names = ("train/z0",) if algorithm == ["kto"] else ("train/shift", "train/udm_weight", "train/udm_accuracy")
        measured.append([float(rows[-1][name]) for name in names])
    assert measured[0][0] != 0
    assert measured[1] == pytest.approx(measured[0], rel=1e-3)


def test_the_tokens_of_a_step_of_samples_are_those_of_both_processes(tmp_path: Path) -> None:
    """The step's loss divides by a count made before its first backward; the metric by the tokens that came along."""
    teacher = ["algorithm.teacher._target_=alignment.model.tiny.Tiny", "algorithm.teacher.path=null"]
    words = ["algorithm=gkd", "algorithm.lmbda=1", "rollout.max_new_tokens=6", "trainer.devices=2"]
    curve(tmp_path, *words, *teacher, "+algorithm.teacher.seed=1")
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "train"]
    assert len(rows) == 3
    for row in rows:
        assert float(row["train/on_policy"]) == 1
        assert float(row["train/loss"]) == pytest.approx(float(row["train/divergence"]), rel=1e-5)


def test_stored_reference_logprobs_belong_to_their_rows_on_both_ranks(tmp_path: Path, monkeypatch) -> None:
    """B35: seven rows of different lengths, two ranks, two shuffled passes; each is computed once, and again by nobody.

    The reference of `frozen` is computed in every step from the rows at hand, so equal curves mean equal rows. The loss
    moves, by a large learning rate, so that a value of another row would show.
    """
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    rows = [
        {"prompt": f"Say {'ab' * n}.", "chosen": "yes " * (n % 3 + 1), "rejected": "no " * (n + 1)} for n in range(7)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["algorithm=dpo", "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "data.heldout=null"]
    words += ["algorithm.max_steps=7", "algorithm.batch_size=2", "algorithm.microbatch_size=1", "algorithm.lr=1e-2"]
    words += ["trainer.devices=2"]
    direct = curve(tmp_path / "direct", *words, "ref_strategy=frozen")
    stored, again = (curve(tmp_path / name, *words, "ref_strategy=precompute") for name in ("stored", "again"))
    assert direct[:, 0].std() > 1e-3
    torch.testing.assert_close(stored, direct, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(again, direct, rtol=1e-5, atol=1e-7)
    shards = [
        path.read_bytes()[32:] for path in (tmp_path / "cache" / "reference").rglob("*.shard")
    ]  # after a checksum
    assert sum(len(load(shard)["lengths"]) for shard in shards) == 7
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("stored", "again")]
    assert [summary["reference/computed"] for summary in summaries] == [7, 0]
