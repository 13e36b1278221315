"""The facts that hold on the real model. Two of them in the usual run, the others are slow."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import run
from alignment.batch import collate
from alignment.config import build
from alignment.data.arithmetic import Arithmetic
from alignment.data.encode import encode
from alignment.model.adapters import adapter_off
from alignment.model.logprobs import completion_logprobs
from alignment.model.smollm2 import SmolLM2

FLOAT32 = ["trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
DPO = ["algorithm=dpo", "algorithm.batch_size=4", "algorithm.microbatch_size=4"]
GRPO = ["algorithm=grpo", "algorithm.num_rollouts=1", "algorithm.num_prompts=2", "algorithm.microbatch_size=16"]


def first_row(folder: Path) -> dict[str, float]:
    with open(folder / "metrics.csv") as file:
        row = next(row for row in csv.DictReader(file) if row["phase"] == "train")
    return {name: float(value) for name, value in row.items() if value and name != "phase"}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["lora", pytest.param("frozen", marks=SLOW)])
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=SLOW), "bf16-mixed"])
def test_the_first_dpo_loss_is_ln_2(tmp_path: Path, strategy: str, precision: str) -> None:
    words = [f"output_dir={tmp_path}", f"ref_strategy={strategy}", *DPO, "algorithm.max_steps=1"]
    run.run([*words, *FLOAT32, f"trainer.precision={precision}"])
    row = first_row(tmp_path)
    assert row["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert row["train/rewards/margins"] == 0


@SLOW
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_the_first_grpo_ratio_is_exactly_1(tmp_path: Path, precision: str, iterations: int) -> None:
    words = [f"output_dir={tmp_path}", *GRPO, *FLOAT32, f"algorithm.num_iterations={iterations}"]
    run.run([*words, f"trainer.precision={precision}"])
    row = first_row(tmp_path)
    assert row["train/ratio"] == 1
    assert row["train/kl"] == 0


@pytest.fixture(scope="module")
def source() -> SmolLM2:
    return SmolLM2(lora={"r": 16, "lora_alpha": 32})


def pairs(source: SmolLM2):
    rows = Arithmetic(heldout=0.25).load("pairs")[0][:4]
    return collate(encode(rows, "pairs", source.tokenizer, max_prompt_tokens=128, max_completion_tokens=32)[0])


@torch.no_grad()
def test_the_adapter_switched_off_is_the_frozen_copy(source: SmolLM2) -> None:
    """After training has moved the adapter, not only at its start."""
    policy, frozen, batch = source.policy(), source.frozen(), pairs(source)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter) * 0.02)
    trained = completion_logprobs(policy, batch).logprobs
    with adapter_off(policy):
        reference = completion_logprobs(policy, batch).logprobs
    expected = completion_logprobs(frozen, batch).logprobs
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-6)
    assert (trained - expected).abs().max() > 0.01


@SLOW
def test_the_saved_folder_gives_the_same_logprobs_in_plain_peft(tmp_path: Path, source: SmolLM2) -> None:
    words = [f"output_dir={tmp_path}", *DPO, "algorithm.max_steps=3", "algorithm.lr=1e-3", *FLOAT32]
    run.run(words)
    base = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = build({"_target_": "alignment.model.smollm2.SmolLM2", "adapter_path": str(tmp_path / "model"), "lora": {}})
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2 + 2?"}], tokenize=False)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        one = loaded(ids).logits.log_softmax(-1)
        two = ours.policy().eval()(ids).logits.log_softmax(-1)
        untrained = source.frozen()(ids).logits.log_softmax(-1)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    assert (one - untrained).abs().max() > 0.01
