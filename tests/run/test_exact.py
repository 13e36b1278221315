"""What must hold to the last bit, or to 1e-5: first steps, microbatches, resuming, evaluation that leaves no trace."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import run
from alignment.errors import UserError

ROOT = Path(run.__file__).parent
BASE = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "rollout.max_new_tokens=6"]
GRPO = ["algorithm=grpo", "algorithm.num_rollouts=4", "algorithm.num_prompts=2", "algorithm.microbatch_size=16"]
# Pairs of samples are often equal in reward, so that further prompts have to be drawn.
DAPO = ["algorithm=dapo", "algorithm.num_rollouts=4", "algorithm.num_prompts=8", "algorithm.group_size=2"]
DAPO += ["algorithm.microbatch_size=16", "algorithm.max_draws=3"]
# Groups of equal rewards give way to those of earlier rollouts, whose probability ratios are no longer 1.
REPLAY = ["algorithm=grpo", *DAPO[1:-1], "algorithm.num_replay_groups=4"]
PPO = ["algorithm=ppo", *GRPO[1:], "algorithm.target_kl_per_sequence=0.01", "algorithm.kl_horizon=64"]
# Two models decode together; of each pair of samples one is learned from.
NASH = ["algorithm=nash_md", "algorithm.num_rollouts=4", "algorithm.num_prompts=8", "algorithm.microbatch_size=8"]
DPO = ["algorithm=dpo", "algorithm.max_steps=4", "algorithm.batch_size=8", "algorithm.microbatch_size=8"]
SFT = ["algorithm=sft", "algorithm.max_steps=4", "algorithm.batch_size=8", "algorithm.microbatch_size=8"]
NOISY = [*SFT, "algorithm.neftune_alpha=5", "algorithm.label_smoothing=0.1"]
# A teacher with other weights than the student; with seed 0 the steps 1 and 3 are on-policy, 0 and 2 are not.
GKD = ["algorithm=gkd", "algorithm.max_steps=4", "algorithm.batch_size=8", "algorithm.microbatch_size=8"]
GKD += ["algorithm.teacher._target_=alignment.model.tiny.Tiny", "algorithm.teacher.path=null"]
GKD += ["+algorithm.teacher.seed=1"]
DROPOUT = ["model.lora.lora_dropout=0.1", "algorithm.microbatch_size=4"]
# An untrained model answers nothing right, so every advantage would be 0: pay for short answers instead.
PAID = ["reward=function", f"reward.function.path={ROOT}/tests/run/rewards.py:digits"]
QUIET = ["evaluation.num_prompts=0"]


def train(folder: Path, *words: str) -> dict[str, float]:
    return run.run([f"output_dir={folder}", *BASE, *PAID, *words])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "adapter_model.safetensors")


def rows(folder: Path, phase: str = "train") -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["phase"] == phase]


def assert_same_weights(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("strategy", ["lora", "frozen"])
def test_the_first_dpo_step_knows_no_preference(tmp_path: Path, strategy: str) -> None:
    train(tmp_path, *DPO, *QUIET, f"ref_strategy={strategy}")
    first = rows(tmp_path)[0]
    assert float(first["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(first["train/rewards/margins"]) == 0
    assert float(first["train/rewards/accuracies"]) == 0


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_first_grpo_ratio_is_exactly_one(tmp_path: Path, iterations: int) -> None:
    train(tmp_path, *GRPO, *QUIET, f"algorithm.num_iterations={iterations}")
    steps = rows(tmp_path)
    for row in steps[::iterations]:
        assert float(row["train/ratio"]) == 1
    assert float(steps[0]["train/kl"]) == 0
    assert float(steps[-1]["train/kl"]) > 0
    if iterations == 2:
        assert float(steps[1]["train/ratio"]) != 1


def test_replayed_groups_are_learned_from_at_their_own_ratio(tmp_path: Path) -> None:
    train(tmp_path / "off", *REPLAY, *QUIET, "algorithm.num_replay_groups=0")
    train(tmp_path / "on", *REPLAY, *QUIET)
    off, on = rows(tmp_path / "off"), rows(tmp_path / "on")
    shares = [float(row["rollout/replayed"]) for row in on]
    assert shares[0] == 0 and max(shares) > 0
    first = next(n for n, share in enumerate(shares) if share)
    assert [float(row["train/ratio"]) for row in on[:first]] == [1.0] * first
    assert all((float(row["train/ratio"]) != 1) == (share > 0) for row, share in zip(on, shares, strict=True))
    assert on[first]["rollout/reward"] == off[first]["rollout/reward"]
    assert on[first]["train/grad_norm"] != off[first]["train/grad_norm"]


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [
        (GRPO, (16, 8, 4)),
        ([*GRPO, "algorithm.num_iterations=2"], (16, 8)),
        (REPLAY, (16, 8)),
        (NASH, (8, 4, 1)),
        (DPO, (8, 4, 1)),
        (SFT, (8, 2, 1)),
        (GKD, (8, 2)),
        ([*SFT, "algorithm.length_window=2"], (8, 4)),
    ],
)
def test_the_microbatch_changes_neither_loss_nor_gradient(tmp_path: Path, algorithm: list[str], sizes) -> None:
    """B22, B23: rows of different lengths, cut into 1 to 8 microbatches, give the same steps."""
    curves = []
    for size in sizes:
        train(
            tmp_path / str(size),
            *algorithm,
            *QUIET,
            f"algorithm.microbatch_size={size}",
            "trainer.gradient_clip_val=null",
        )
        curves.append([(float(r["train/loss"]), float(r["train/grad_norm"])) for r in rows(tmp_path / str(size))])
    for other in curves[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(curves[0]), rtol=1e-4, atol=1e-6)
        first, reference = torch.tensor(other[0]), torch.tensor(curves[0][0])
        torch.testing.assert_close(first, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algorithm", [GRPO, [*GRPO, "algorithm.num_iterations=2"], [*DPO, *DROPOUT], NOISY])
def test_an_evaluation_leaves_training_as_it_was(tmp_path: Path, algorithm: list[str]) -> None:
    """B48."""
    train(tmp_path / "without", *algorithm, *QUIET)
    train(tmp_path / "with", *algorithm, "evaluation.num_prompts=4", "evaluation.every=1")
    assert_same_weights(tmp_path / "without", tmp_path / "with")


@pytest.mark.parametrize("algorithm", [GRPO, [*DPO, *DROPOUT]])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path, algorithm: list[str]) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, *algorithm, *QUIET, f"seed={seed}")
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    one, other = weights(tmp_path / "a"), weights(tmp_path / "c")
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO,
        [*GRPO, "algorithm.num_iterations=2", "ref_strategy=sync", "ref_strategy.every=3"],
        PPO,
        DAPO,
        [*REPLAY, "algorithm.top_entropy=0.5", "ref_strategy=sync", "ref_strategy.every=3", "algorithm.kl=reward"],
        NASH,
        [*NASH, "ref_strategy=sync", "ref_strategy.every=3"],
        [*DPO, *DROPOUT],
        [*DPO, "ref_strategy=precompute"],
        NOISY,
        [*GKD, "algorithm.length_window=3"],
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights_and_metrics(
    tmp_path: Path, algorithm: list[str], monkeypatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    words = [*BASE, *PAID, *algorithm, "checkpoint.every=1", "checkpoint.keep=1"]
    words += ["evaluation.num_prompts=4", "evaluation.every=1"]
    run.run([f"output_dir={tmp_path / 'whole'}", *words])
    kill_at_second_checkpoint(tmp_path / "killed", words)
    run.run([f"resume={tmp_path / 'killed'}"])
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    drop = ("time/", "seconds")
    for phase in ("train", "val"):
        whole, killed = (
            [{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows(tmp_path / name, phase)]
            for name in ("whole", "killed")
        )
        assert [row for row in whole if int(row["step"])] == [row for row in killed if int(row["step"])]


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        (GRPO, "algorithm.num_rollouts", "2"),
        ([*DPO, *DROPOUT], "algorithm.max_steps", "2"),
        ([*SFT, "algorithm.max_steps=null", "algorithm.num_epochs=0.5"], "algorithm.num_epochs", "0.25"),
    ],
)
def test_a_finished_run_is_given_more_steps_and_never_fewer(
    tmp_path: Path, algorithm: list[str], key: str, value: str
) -> None:
    words = [*algorithm, "algorithm.lr_schedule=constant", "evaluation.num_prompts=4", "evaluation.every=1"]
    train(tmp_path / "whole", *words)
    train(tmp_path / "longer", *words, f"{key}={value}")
    short = (tmp_path / "longer" / "config.yaml").read_text()
    more = next(word for word in reversed(algorithm) if word.startswith(f"{key}="))
    run.run([f"resume={tmp_path / 'longer'}", more])
    assert_same_weights(tmp_path / "whole", tmp_path / "longer")
    assert [row["step"] for row in rows(tmp_path / "longer")] == [row["step"] for row in rows(tmp_path / "whole")]
    long = (tmp_path / "longer" / "config.yaml").read_text()
    assert short != long

    with pytest.raises(UserError, match=rf"{key}: .* this run has made"):
        run.run([f"resume={tmp_path / 'longer'}", f"{key}={value}"])
    assert (tmp_path / "longer" / "config.yaml").read_text() == long


def kill_at_second_checkpoint(folder: Path, words: list[str]) -> None:
    """Start the run by itself and kill it, unannounced, once it has a checkpoint and has gone on."""
    process = subprocess.Popen(
        [
            sys.executable,
            "run.py",
            f"output_dir={folder}",
            *words,
            "reward.function.path=" + PAID[1].split("=")[1] + "_slowly",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not any(int(path.stem) >= 2 for path in (folder / "checkpoints").glob("*.ckpt")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_four_jobs_in_four_folders(tmp_path: Path) -> None:
    common = ["algorithm.lr=1e-4", *BASE, *PAID, *QUIET, "rollout.max_new_tokens=2"]
    done = subprocess.run(
        [sys.executable, "run.py", "-m", "algorithm=grpo,dpo", "seed=1,2", f"hydra.sweep.dir={tmp_path}", *common],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summaries = sorted(tmp_path.glob("*/summary.json"))
    assert [path.parent.name for path in summaries] == ["0", "1", "2", "3"]
    assert len({json.loads(path.read_text())["train/loss"] for path in summaries}) >= 2
