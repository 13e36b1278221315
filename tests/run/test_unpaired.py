"""KTO and BCO through run.py: the cut of a step, a run that goes on, the reference cache, the first step."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import run

SMALL = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "rollout.max_new_tokens=2"]
SMALL += ["evaluation.num_prompts=0", "algorithm.batch_size=8", "algorithm.lr=3e-2"]


def train(folder: Path, *words: str) -> dict[str, float]:
    return run.run([f"output_dir={folder}", *SMALL, *words])


def rows(folder: Path, phase: str = "train") -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["phase"] == phase]


def curve(folder: Path, *names: str) -> torch.Tensor:
    return torch.tensor([[float(row[f"train/{name}"]) for name in names] for row in rows(folder)])


@pytest.mark.parametrize(("algorithm", "moving", "first"), [("kto", "z0", 0.5), ("bco", "shift", math.log(2))])
def test_the_cut_of_a_step_changes_neither_loss_nor_gradient(
    tmp_path: Path, algorithm: str, moving: str, first
) -> None:
    """z0 and the shift are of whole steps, so even microbatches of one row give the same run.

    In the first step policy = reference: every log-ratio, z0 and the shift are 0.
    """
    for size in (8, 4, 1):
        words = [f"algorithm={algorithm}", "algorithm.max_steps=4", f"algorithm.microbatch_size={size}"]
        train(tmp_path / str(size), *words, "trainer.gradient_clip_val=null", "evaluation.every=4")
    whole = curve(tmp_path / "8", "loss", "grad_norm", moving)
    assert float(whole[0, 0]) == pytest.approx(first, abs=1e-6)
    assert float(whole[0, 2]) == 0
    assert float(whole[-1, 2]) != 0
    for size in (4, 1):
        cut = curve(tmp_path / str(size), "loss", "grad_norm", moving)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    held = [rows(tmp_path / str(size), "val")[-1]["val/loss"] for size in (8, 1)]
    assert float(held[0]) == pytest.approx(float(held[1]), rel=1e-4)
    counts = curve(tmp_path / "4", "num_chosen", "num_rejected")
    assert counts.sum(1).tolist() == [8.0] * 4


@pytest.mark.parametrize("algorithm", [["kto"], ["bco", "algorithm.density_ratio=[0.5,10]"]])
def test_a_run_that_goes_on_ends_as_the_whole_one(tmp_path: Path, algorithm: list[str]) -> None:
    words = [f"algorithm={algorithm[0]}", *algorithm[1:], "algorithm.max_steps=4", "algorithm.microbatch_size=4"]
    train(tmp_path, *words, "checkpoint.every=1", "checkpoint.keep=-1", "evaluation.every=2")
    weights, metrics = load_file(tmp_path / "model" / "adapter_model.safetensors"), rows(tmp_path)
    for path in (tmp_path / "checkpoints").glob("*.ckpt"):
        if int(path.stem) > 2:
            path.unlink()
    run.run([f"resume={tmp_path}"])
    again = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    for one, other in zip(metrics, rows(tmp_path), strict=True):
        assert {k: v for k, v in one.items() if "time" not in k and "seconds" not in k} == {
            k: v for k, v in other.items() if "time" not in k and "seconds" not in k
        }


def test_a_stored_reference_gives_the_same_kto_and_serves_another_seed(tmp_path: Path, monkeypatch) -> None:
    """81 problems with two rows each, and as many mismatched pairs, a few of which are rows by chance."""
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    words = ["algorithm=kto", "algorithm.max_steps=3", "algorithm.microbatch_size=4"]
    for strategy in ("lora", "precompute"):
        train(tmp_path / strategy, *words, f"ref_strategy={strategy}")
    live, stored = (curve(tmp_path / name, "loss", "z0", "grad_norm") for name in ("lora", "precompute"))
    torch.testing.assert_close(stored, live, rtol=1e-5, atol=1e-6)
    assert live[-1, 1] != 0
    again = train(tmp_path / "other", *words, "ref_strategy=precompute", "seed=5", "algorithm.beta=0.5")
    assert again["reference/computed"] == 0
    assert 2 * 81 < again["reference/reused"] <= 4 * 81
