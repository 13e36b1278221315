"""Bytes from shapes, against arithmetic by hand and real models."""

from __future__ import annotations

import pytest

from alignment.model import memory
from alignment.model.memory import Formats, Shape
from alignment.model.tiny import Tiny

# Llama 2 7B: 32 layers of 4 * 4096^2 + 3 * 4096 * 11008 Linear weights, two norms each, a last one, and two tables.
LINEAR = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
LLAMA = Shape(32, 4096, 11008, 4096, 4096, 32000, LINEAR + 65 * 4096 + 2 * 32000 * 4096, LINEAR, 0)
BF16 = Formats(stored=2, compute=2, linear=2)


@pytest.mark.parametrize(
    ("algorithm", "gb"), [("sft", 14), ("dpo", 28), ("ppo", 56), ("grpo", 42), ("orpo", 14), ("kto", 28)]
)
def test_seven_billion_weights_in_bfloat16(algorithm: str, gb: float) -> None:
    """2 bytes * 7e9 for each of one, two, three or four models."""
    assert memory.models_gb(algorithm, 7e9) == pytest.approx(gb)


def test_llama_7b_weighs_what_is_published() -> None:
    assert LLAMA.weights == 6_738_415_616  # Llama 2's model card: 6.74B
    assert memory.held(LLAMA, BF16, frozen=True) == 2 * 6_738_415_616


def test_full_training_in_float32_takes_sixteen_bytes_a_weight() -> None:
    """Weight 4, gradient 4, two moments 8 (ZeRO, 1910.02054 section 3.1, without its half copies)."""
    parts = memory.trained(LLAMA.weights, 4)
    assert memory.held(LLAMA, Formats(4, 4, 4), frozen=False) + sum(parts.values()) == 16 * LLAMA.weights


def test_a_base_in_four_bit() -> None:
    """0.5 bytes for a Linear weight, and 2 for the tables and norms."""
    rest = LLAMA.weights - LINEAR
    assert memory.held(LLAMA, Formats(2, 2, 0.5), frozen=True) == 0.5 * LINEAR + 2 * rest


def test_keys_and_values_of_a_token() -> None:
    """32 layers * 2 * 4096 * 2 bytes = 512 KiB a token, Llama's known figure; 128 columns more are kept free."""
    assert memory.cache(LLAMA, BF16, 1, 256) == (256 + 128) * 512 * 1024


def test_activations_of_a_token() -> None:
    """SmolLM2's layer (576 wide, 1536 inner, 192 of keys) with all weights trained, bfloat16 products: norms 16 * 576,
    five inputs of 2 * 576, attention 4 * (576 + 192) + 2 * (192 + 1152), MLP 8 * 1536."""
    small = Shape(30, 576, 1536, 576, 192, 49152, 0, 0, 0)
    layer = 9216 + 5760 + 3072 + 2688 + 12288
    formats = Formats(4, 2, 2)
    assert memory.activations(small, formats, 7, frozen=False, checkpointing=False) == 7 * 30 * layer
    assert memory.activations(small, formats, 7, frozen=False, checkpointing=True) == 7 * (30 * 4 * 576 + layer)


def test_a_chunk_of_the_head() -> None:
    assert memory.head_chunk(LLAMA, BF16, 1024) == 1024 * 32000 * 8
    assert memory.head_chunk(LLAMA, Formats(4, 4, 4), 1024) == 1024 * 32000 * 4


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_shape_counts_what_the_model_has(adapter) -> None:
    source = Tiny(adapter=adapter, lora={"r": 4})
    shape, policy = memory.shape_of(source), source.policy()
    total = sum(p.numel() for p in policy.parameters())
    learned = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert shape.weights + shape.adapter == total
    assert (shape.adapter or shape.weights) == learned
    # Two layers: query and output 64 * 64, key and value 64 * 32, three of the MLP 64 * 192.
    assert shape.linear == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
