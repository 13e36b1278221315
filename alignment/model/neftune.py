"""Noise on the input embeddings while training (NEFTune, 2310.05914), whatever the way to the log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.batch import Batch
from alignment.losses.sft import neftune_bound


@dataclass(frozen=True)
class EmbeddingNoise:
    """What is added to the embeddings of a batch: prompt (B, P, H) and completion (N, C, H), 0 outside the masks."""

    prompt: Tensor
    completion: Tensor

    @classmethod
    def draw(cls, model: PreTrainedModel, batch: Batch, fed: Tensor, *, alpha: float) -> EmbeddingNoise:
        """Uniform within alpha / sqrt(L H), from torch's global generator. fed (N, C): completion tokens to embed.

        L is a row's own length, prompt and completion. Numbers are drawn for real tokens only, row by row: neither
        padding nor, on a CPU, the cut into microbatches changes them. Raises ValueError for several completions of a
        prompt, whose shared tokens would be of rows of several lengths.
        """
        if batch.group_size != 1:
            raise ValueError(f"embedding noise needs one completion per prompt, the batch has {batch.group_size}")
        real = torch.cat([batch.prompt_mask, fed], 1)
        weight = _embedding(model).weight
        assert isinstance(weight, Tensor)
        width = weight.shape[-1]
        lengths = batch.prompt_mask.sum(1) + batch.completion_mask.sum(1)
        bounds = neftune_bound(lengths.float(), width, alpha=alpha).repeat_interleave(real.sum(1))
        noise = torch.zeros(*real.shape, width, device=real.device)
        noise[real] = (torch.rand(len(bounds), width, device=real.device) * 2 - 1) * bounds[:, None]
        prompt, completion = noise.split([batch.prompt_mask.shape[1], fed.shape[1]], 1)
        return cls(prompt, completion)


@contextmanager
def noisy_embeddings(model: PreTrainedModel, noise: Tensor | None) -> Iterator[None]:
    """Add noise (rows, width, H) to what the input embedding gives for the one forward inside; None = nothing."""
    if noise is None:
        yield
        return
    added = noise

    def add(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        return output + added.to(output.dtype)

    hook = _embedding(model).register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _embedding(model: PreTrainedModel) -> nn.Module:
    embedding = model.get_input_embeddings()
    assert embedding is not None  # a causal LM takes token ids
    return embedding
