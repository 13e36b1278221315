"""How many bytes a run needs, from shapes alone: every formula of the planner is in this file.

Peaks are sums of what is alive together; what an allocator wastes is not in them (docs/memory.md has measured ratios).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from alignment.errors import UserError

GIB = 2**30
# Python, torch, transformers and Lightning in main memory: measured resident size of a run before it loads a model
# (torch 2.13, CPU), 620 to 660 MiB.
LIBRARIES = 640 * 2**20
# Models that are held at once where nothing is shared.
MODELS = {
    "sft": ("policy",),
    "orpo": ("policy",),
    "dpo": ("policy", "reference"),
    "kto": ("policy", "reference"),
    "grpo": ("policy", "reference", "reward model"),
    "ppo": ("policy", "reference", "reward model", "critic"),
}


def models_gb(algorithm: str, num_weights: float, bytes_per_weight: float = 2.0) -> float:
    """Weights alone, in GB (10^9 bytes), of the models of MODELS, all of one size."""
    return len(MODELS[algorithm]) * num_weights * bytes_per_weight / 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder as the formulas see it; counts are of weights, a tied one counted once.

    linear: those of its Linear layers but the output head, which `frozen_dtype` compacts. adapter: those of LoRA.
    """

    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocabulary: int
    weights: int
    linear: int
    adapter: int


def shape_of(source: Any) -> Shape:
    """The shape of a model source's policy, built on the meta device: no weight is read or drawn."""
    try:
        config: Any = AutoConfig.from_pretrained(
            source.folder, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except OSError as error:
        raise UserError(f"model.path: {source.folder} gives no config: type model.path=<folder or hub name>") from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
        weights = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings()
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        adapter = _adapter_weights(source, model)
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * size
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Shape(
        text.num_hidden_layers, text.hidden_size, inner, heads * size, keys, text.vocab_size, weights, linear, adapter
    )


def _adapter_weights(source: Any, model: Any) -> int:
    if source.adapter != "lora":
        return 0
    if source.adapter_path:
        config: Any = PeftConfig.from_pretrained(source.adapter_path)
        config.inference_mode = False
    else:
        config = LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear", **source.lora})
    return sum(p.numel() for p in get_peft_model(model, config).parameters() if p.requires_grad)


@dataclass(frozen=True)
class Formats:
    """Bytes a number takes. stored: of a weight as loaded. compute: in products. linear: of a frozen Linear weight."""

    stored: float
    compute: float
    linear: float


def held(shape: Shape, formats: Formats, *, frozen: bool) -> float:
    """Weights of one model in memory; the Linear ones of a frozen one in their own format."""
    if not frozen:
        return shape.weights * formats.stored
    return (shape.weights - shape.linear) * formats.stored + shape.linear * formats.linear


def trained(num_weights: int, stored: float, *, moment: float = 4.0) -> dict[str, float]:
    """Gradients, in the weights' format, and AdamW's two moments, of `moment` bytes a number."""
    return {"gradients": num_weights * stored, "optimizer": 2 * num_weights * moment}


def layer_activations(shape: Shape, formats: Formats, *, frozen: bool) -> float:
    """Bytes per token that one Llama-like layer keeps for backward.

    Two norms keep their float32 input, and where their weight is trained the normalised one too; each Linear keeps its
    own copy of its input in the format of the product (three of attention and two of the MLP read one tensor, and
    every one casts it for itself); attention keeps query, key, value and output, the first two float32 since the
    rotation is; the MLP keeps gate, its activation, and the other factor.
    """
    size = formats.compute
    casts = 1 if size < 4 else 0  # in float32 the input of a Linear is the tensor that is there already
    norms = (8 if frozen else 16) * shape.hidden
    inputs = casts * 5 * size * shape.hidden + (0 if casts else 2 * 4 * shape.hidden * frozen)
    attention = 4 * (shape.query + shape.key) + size * (shape.key + 2 * shape.query)
    return norms + inputs + attention + 4 * size * shape.inner


def activations(shape: Shape, formats: Formats, num_tokens: int, *, frozen: bool, checkpointing: bool) -> float:
    """Of one microbatch. With checkpointing: each layer's float32 input, and one layer at a time as a whole."""
    layer = layer_activations(shape, formats, frozen=frozen)
    if checkpointing:
        return num_tokens * (4 * shape.hidden * shape.layers + layer)
    return num_tokens * layer * shape.layers


def head_chunk(shape: Shape, formats: Formats, num_tokens: int) -> float:
    """Of one chunk through the output head: float32 logits, and the product and its coefficients in compute format."""
    return num_tokens * shape.vocabulary * (4 + 2 * formats.compute * (formats.compute < 4))


def cache(shape: Shape, formats: Formats, num_rows: int, num_columns: int) -> float:
    """Keys and values of the rows decoded at a time, with the room that the buffers keep behind them."""
    columns = num_columns + max(64, num_columns // 2)
    return 2 * shape.layers * shape.key * formats.compute * num_rows * columns
