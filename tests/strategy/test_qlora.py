"""strategy=qlora: 4-bit weights below an adapter, with the gradients of the model that they round to."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit
from torch import nn

import run
from alignment.batch import Example, collate
from alignment.model.hf import HFModel
from alignment.model.logprobs import completion_logprobs
from alignment.model.smollm2 import SmolLM2
from alignment.model.tiny import Tiny
from alignment.strategy.qlora import QLoRA

WORDS = ["model=tiny", "strategy=qlora", "trainer.precision=32-true", "evaluation.num_prompts=2"]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def rounded(source: HFModel) -> Any:
    """A float32 policy whose base holds the very numbers that the 4-bit weights stand for."""
    policy: Any = source.policy()
    quantised = {
        name: bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        for name, module in policy.named_modules()
        if isinstance(module, Linear4bit)
    }
    source.quantization_config = None
    torch.manual_seed(0)
    plain: Any = source.policy()
    assert len(quantised) == 14  # seven products in each of two layers
    for name, weight in quantised.items():
        plain.get_submodule(name).weight.data.copy_(weight)
    return policy, plain


def gradients(policy: nn.Module) -> dict[str, torch.Tensor]:
    batch = collate([Example([5, 6, 7], [[8, 9], [10, 11, 12]]), Example([13], [[14], [15, 16]])])
    completion_logprobs(policy, batch).logprobs.sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_the_rounded_model_also_after_an_eval_pass() -> None:
    source = Tiny(lora=LORA | {"init_lora_weights": False})
    QLoRA().prepare(source)
    torch.manual_seed(0)
    policy, plain = rounded(source)
    with torch.no_grad():  # where bitsandbytes would repack the weights for inference, without a gradient
        policy.eval()(torch.tensor([[1, 2, 3]]))
    policy.train()
    found, expected = gradients(policy), gradients(plain)
    assert found.keys() == expected.keys()
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", ["lora", "frozen", "precompute", "sync"])
def test_the_first_loss_is_ln_2_whatever_keeps_the_reference(tmp_path: Path, reference: str) -> None:
    words = [*WORDS, "algorithm=dpo", f"ref_strategy={reference}", "algorithm.max_steps=2"]
    run.run([*words, f"output_dir={tmp_path / 'run'}"])
    with open(tmp_path / "run" / "metrics.csv") as file:
        first = next(float(row["train/loss"]) for row in csv.DictReader(file) if row["phase"] == "train")
    assert first == pytest.approx(math.log(2), abs=1e-6)


def test_a_rollout_starts_with_ratio_1(tmp_path: Path) -> None:
    words = ["algorithm=grpo", "algorithm.num_rollouts=1", "algorithm.num_prompts=2", "algorithm.microbatch_size=16"]
    run.run([*WORDS, *words, f"output_dir={tmp_path / 'run'}"])
    with open(tmp_path / "run" / "metrics.csv") as file:
        row = next(row for row in csv.DictReader(file) if row["phase"] == "train")
    assert abs(float(row["train/kl"])) < 1e-6
    saved = (tmp_path / "run" / "model" / "adapter_model.safetensors").stat().st_size
    assert saved < 400_000  # the adapter alone


@pytest.mark.slow
def test_weights_take_less_than_four_tenths() -> None:
    """SmolLM2, whose vocabulary, kept in float32, is a fifth of it."""

    def held(source: HFModel) -> int:
        policy: Any = source.policy()
        tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*policy.parameters(), *policy.buffers())}
        return sum(tensors.values())

    plain, quantised = SmolLM2(lora=LORA), SmolLM2(lora=LORA)
    QLoRA().prepare(quantised)
    share = held(quantised) / held(plain)
    print(f"weights in 4 bit take {share:.3f} of float32")
    assert share < 0.4
