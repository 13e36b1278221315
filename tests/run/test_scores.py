"""A reward model's run from end to end: what its folder says elsewhere is what the run said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import run
from alignment.batch import collate
from alignment.data.arithmetic import Arithmetic
from alignment.data.encode import encode
from alignment.model.hf import HFModel
from alignment.model.scorer import completion_scores

COMMON = ["trainer.precision=32-true", "trainer.enable_progress_bar=false"]
TINY = ["model=tiny", "algorithm=reward_model", "algorithm.batch_size=8", "algorithm.microbatch_size=4", *COMMON]


def said_by_the_run(folder: Path, step: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] == step]


def said_by_transformers(folder: Path, rows: list[dict[str, Any]]) -> torch.Tensor:
    """In batches, padded by the folder's own tokenizer; a text ends with the end token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    talks = [[*row["prompt"], {"role": "assistant", "content": row["completion"]}] for row in rows]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n") for talk in talks]
    scores = []
    with torch.no_grad():
        for start in range(0, len(texts), 10):
            padded = tokenizer(texts[start : start + 10], return_tensors="pt", padding=True, add_special_tokens=False)
            scores.append(model(**padded).logits[:, 0])
    return torch.cat(scores)


def compared(folder: Path, step: int) -> float:
    """Largest difference of the two, over all held-out completions."""
    rows = said_by_the_run(folder, step)
    assert len(rows) == 40  # 20 held-out pairs
    return float((said_by_transformers(folder, rows) - torch.tensor([row["reward"] for row in rows])).abs().max())


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_the_saved_folder_scores_like_the_run_and_rewards_another(tmp_path: Path, adapter: str) -> None:
    words = [f"output_dir={tmp_path / 'rm'}", *TINY, f"model.adapter={adapter}", "ref_strategy=none"]
    summary = run.run([*words, "algorithm.max_steps=2", "algorithm.lr=1e-2", "evaluation.every=2"])
    assert compared(tmp_path / "rm", 2) < 1e-5
    assert said_by_the_run(tmp_path / "rm", 0)[0]["reward"] != said_by_the_run(tmp_path / "rm", 2)[0]["reward"]
    assert {"val/accuracy", "val/calibration_error", "val/rewards/std", "train/rewards/std"} <= summary.keys()
    assert not [name for name in summary if "kl" in name]
    online = ["model=tiny", "algorithm=grpo", "algorithm.num_rollouts=1", "algorithm.num_prompts=2", *COMMON]
    online += ["algorithm.microbatch_size=16", "rollout.max_new_tokens=4", "evaluation.num_prompts=0"]
    online += ["reward=model", f"reward.model.path={tmp_path / 'rm' / 'model'}", f"output_dir={tmp_path / 'grpo'}"]
    assert run.run(online)["rollout/reward_std"] > 0


def test_the_cut_into_microbatches_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    curves = []
    for size in (8, 2):
        words = [f"output_dir={tmp_path / str(size)}", *TINY, f"algorithm.microbatch_size={size}"]
        summary = run.run([*words, "algorithm.max_steps=2"])
        curves.append(torch.tensor([summary["train/loss"], summary["train/grad_norm"], summary["val/loss"]]))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-4, atol=1e-6)  # two steps of Adam magnify 1e-7


def test_a_resumed_run_ends_in_the_same_folder(tmp_path: Path) -> None:
    """Cut back to its second checkpoint, with dropout."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["algorithm.max_steps=4", "evaluation.every=2", "model.lora.lora_dropout=0.1"]
    run.run([f"output_dir={whole}", *TINY, *words, "checkpoint.every=1", "checkpoint.keep=-1"])
    shutil.copytree(whole, cut)
    for name in ("checkpoints/00000003.ckpt", "checkpoints/00000004.ckpt", "summary.json"):
        (cut / name).unlink()
    shutil.rmtree(cut / "model")
    run.run([f"resume={cut}"])
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert said_by_the_run(whole, 4) == said_by_the_run(cut, 4)


@pytest.mark.slow
def test_smollm2_learns_which_sum_is_right(tmp_path: Path) -> None:
    """961 sums up to 30 + 30, 100 of them held out: of a right and a nearly right answer the right one scores higher.
    The saved folder gives the same scores, in float32, through the shared prompt here and in plain transformers."""
    words = [f"output_dir={tmp_path}", "algorithm=reward_model", "data.low=0", "data.high=30", "data.heldout=100"]
    words += ["algorithm.batch_size=32", "algorithm.microbatch_size=32", "algorithm.max_steps=200", "algorithm.lr=5e-4"]
    summary = run.run([*words, "evaluation.every=200", "trainer.enable_progress_bar=false"])
    assert summary["before/accuracy"] < 0.7
    assert summary["val/accuracy"] >= 0.9
    rows = said_by_the_run(tmp_path, 200)[:40]
    source = HFModel(path=str(tmp_path / "model"), adapter="none")
    pairs = Arithmetic(low=0, high=30, heldout=100).load("pairs")[1][:20]
    batch = collate(encode(pairs, "pairs", source.tokenizer, max_prompt_tokens=128, max_completion_tokens=32)[0])
    assert [row["completion"] for row in rows[:2]] == [pairs[0][side][0]["content"] for side in ("chosen", "rejected")]
    with torch.no_grad():
        ours = completion_scores(source.frozen_scorer(), batch)
    torch.testing.assert_close(ours, said_by_transformers(tmp_path, rows), rtol=1e-5, atol=1e-4)  # scores reach 10
