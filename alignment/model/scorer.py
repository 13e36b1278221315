"""Heads on a language model's backbone in the place of the vocabulary's: a score of a completion, or classes of tokens.

Scores come from the code that computes log-probs: each prompt once for all its completions, and the token at which a
score is read from the completion's length, never from the pad id. The head runs in float32 whatever the backbone does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alignment.batch import Batch
from alignment.errors import UserError
from alignment.model.head import as_forward_of, upcast
from alignment.model.logprobs import completion_states

# What transformers calls the head, in its models for sequences and for tokens.
HEADS = ("score", "classifier")


def completion_scores(model: nn.Module, batch: Batch, *, path: str = "auto", head: nn.Linear | None = None) -> Tensor:
    """(N,) float32, differentiable: the head of one label at the last token of each completion.

    model: what `HFModel.scorer()` gives, or a language model with a `head` beside it. path as for
    `completion_logprobs`. Raises UserError for a head of more labels, and for a completion without tokens, which has no
    place for a score.
    """
    lengths = batch.completion_mask.sum(-1)
    if (empty := (lengths == 0).nonzero().flatten().tolist()) and batch.group_size:
        raise UserError(f"completion {empty[0]} of the batch has no tokens: drop the row, or give it an EOS token")
    head = head or score_head(model)
    if head.out_features != 1:
        raise UserError(f"the head has {head.out_features} labels, and a score is one number: take a reward model")
    last = lengths.cumsum(0) - 1
    return completion_states(
        model, batch, path=path, before=False, head=lambda hidden: _applied(head, hidden[last]).squeeze(-1)
    )


def completion_token_logits(model: nn.Module, batch: Batch, *, path: str = "auto") -> Tensor:
    """(N, C, K) float32, differentiable: the head's K logits at every completion token, 0 outside the mask."""
    head = score_head(model)
    flat = completion_states(model, batch, path=path, before=False, head=lambda hidden: _applied(head, hidden))
    mask = batch.completion_mask[..., None].expand(-1, -1, flat.shape[-1])
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def score_head(model: nn.Module) -> nn.Linear:
    """The head in use: under PEFT the trained copy, not the original one. Raises UserError where there is none."""
    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    head: Any = getattr(plain, head_name(plain))
    if isinstance(head, ModulesToSaveWrapper):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if not isinstance(head, nn.Linear):
        raise UserError(f"{type(plain).__name__} has a head of type {type(head).__name__}: only a Linear is understood")
    return head


def head_name(plain: nn.Module) -> str:
    found = next((name for name in HEADS if isinstance(getattr(plain, name, None), nn.Module)), None)
    if found is None:
        raise UserError(f"{type(plain).__name__} has no head for scores: transformers has no such class for this model")
    return found


def has_score_head(model: nn.Module) -> bool:
    """Whether a model scores instead of speaking."""
    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    speaks = isinstance(plain, PreTrainedModel) and plain.get_output_embeddings() is not None
    return not speaks and any(isinstance(getattr(plain, name, None), nn.Module) for name in HEADS)


def _applied(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Outside autocast: two scores that differ by less than bfloat16 can tell would be a tie."""

    def forward(states: Tensor) -> Tensor:
        states = upcast(states)
        bias = None if head.bias is None else head.bias.to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states, head.weight.to(states.dtype), bias)

    return as_forward_of(head, forward, hidden)


@torch.no_grad()
def draw_head(head: nn.Linear) -> None:
    """N(0, 1 / (H + 1)) from torch's global generator, no bias: first scores of about 1 (2009.01325, App. B.1)."""
    nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def pad_for_scores(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> int:
    """A token to pad with that ends no completion.

    transformers reads a score at the last token that is not the pad token. Where EOS pads, that is the token before the
    EOS, at which no model was trained to judge. Any special token that no completion ends in serves: where it stands
    inside a text it does no harm. A tokenizer whose only special token is its EOS gives the last of its vocabulary.
    """
    own = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    for token in (*own, *sorted(tokenizer.all_special_ids), *range(len(tokenizer) - 1, -1, -1)):
        if isinstance(token, int) and token not in stop_ids:
            return token
    raise UserError("model.path: every token of the tokenizer ends a completion: none is left to pad with")
