"""Token log-probs of a batch's completions: the one function behind every policy, old and reference pass.

Three exact ways to get the hidden states, of which the first is the oracle and the others compute each prompt once:

- dense: every completion with its own copy of its prompt, padded to the longest of both together;
- packed: one row of all prompts and completions without any padding, under `shared_attention`;
- cache: prompts first, their keys and values repeated for the completions that follow. Two forwards.

Then only the states that predict a completion token go through the vocabulary head (`head.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.helpers import disable_input_dtype_casting
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from alignment.batch import Batch
from alignment.errors import UserError
from alignment.model import shared_attention
from alignment.model.fused_lora import fuse_lora
from alignment.model.head import LogitMap, as_forward_of, head_scores
from alignment.model.neftune import EmbeddingNoise, noisy_embeddings
from alignment.model.shared_attention import SharedRow

PATHS = ("auto", "dense", "packed", "cache")
_log = logging.getLogger(__name__)


@dataclass
class TokenScores:
    """Per-token numbers of N completions, each (N, C) and 0 outside `batch.completion_mask`.

    logprobs: float32 (float64 for a float64 model), differentiable. The others were asked for or are None: entropy in
    nats (detached unless `entropy_grad`), log_sum_sq_probs = log sum_v p_v^2 (detached), is_top1 (bool), vocab_mean =
    the mean of log p_v over the vocabulary (differentiable), states: as `completion_states` gives them, (number of
    completion tokens, H), differentiable.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None
    vocab_mean: Tensor | None = None
    states: Tensor | None = None


def completion_logprobs(
    model: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    path: str = "auto",
    chunk_tokens: int = 1024,
    entropy: bool = False,
    entropy_grad: bool = False,
    stats: Collection[str] = (),
    neftune_alpha: float = 0.0,
    states: bool = False,
) -> TokenScores:
    """Log-prob of every completion token given its prompt and the completion before it.

    model: a Hugging Face causal LM, or a `PeftModel` around one. Dropout is the caller's to switch off.
    temperature divides the logits; policy, old and reference passes must use the one the completions were sampled at.
    path: "auto" takes packed where the model allows it, else cache, else dense, whichever is exact. The choice depends
    on the model and the batch's shape alone, so that passes over one batch agree bit for bit.
    stats: of "log_sum_sq_probs", "is_top1", "vocab_mean", "entropy" (the same as entropy=True).
    neftune_alpha: noise on the input embeddings (`EmbeddingNoise`), the same on every path; 0 = none. One completion
    per prompt only.
    states: also give the hidden states before each token, for a value head that reads the policy's own.
    Raises UserError for a model whose logits are not a known function of its head, a path that would not be exact for
    it, a temperature of 0, a completion after an empty prompt.
    """
    if path not in PATHS:
        raise UserError(f"model.shared_prompt: {path!r} is none of {', '.join(PATHS)}: type model.shared_prompt=auto")
    _check_rows(batch)
    wanted = {*stats, *(["entropy"] if entropy or entropy_grad else [])}
    causal = causal_lm(model)
    forward = causal.forward

    def scores() -> tuple[dict[str, Tensor], Tensor]:
        anatomy = _anatomy(causal, forward, batch)
        hidden = _token_states(causal, anatomy, batch, path, before=True, neftune_alpha=neftune_alpha)
        found = head_scores(
            hidden,
            _head(causal),
            batch.completion_ids[batch.completion_mask],
            logit_map=anatomy.logit_map.at_temperature(temperature),
            chunk_tokens=chunk_tokens,
            stats=sorted(wanted),
            entropy_grad=entropy_grad,
        )
        return found, hidden

    flat, hidden = as_forward_of(causal, scores)
    spread = {name: _spread(value, batch.completion_mask) for name, value in flat.items()}
    return TokenScores(**spread, states=hidden if states else None)


def completion_states(
    model: nn.Module,
    batch: Batch,
    *,
    path: str = "auto",
    before: bool = True,
    head: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Last hidden states for a value or reward head: (number of completion tokens, H), differentiable.

    Row k belongs to the k-th True of `batch.completion_mask`. `before`: the state that predicts the token (a critic
    judges what came before the token); otherwise the state at the token (a reward model reads it at the last one).
    model: a causal LM, or a classifier on the same backbone, which has a head of its own in the place of the
    vocabulary's. head: what to make of the states, inside the forward of the model, where sharded weights are whole.
    """
    _check_rows(batch)
    causal = causal_lm(model, vocabulary=False)
    forward = causal.forward

    def states() -> Tensor:
        hidden = _token_states(causal, _anatomy(causal, forward, batch), batch, path, before)
        return hidden if head is None else head(hidden)

    return as_forward_of(causal, states)


def vocabulary_head(model: nn.Module, batch: Batch) -> tuple[nn.Module, LogitMap]:
    """The output embedding of a causal LM, and the map from its product to logits. batch: any tokens of the model."""
    causal = causal_lm(model)
    return _head(causal), _anatomy(causal, causal.forward, batch).logit_map


def causal_lm(model: nn.Module, *, vocabulary: bool = True) -> PreTrainedModel:
    """The Hugging Face causal LM inside. Its adapter layers, put in place by PEFT, stay active.

    vocabulary: False takes a model without output embedding too.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UserError(
            f"{type(config).__name__} puts virtual tokens before every prompt, which a shared prompt does not carry: "
            "take an adapter inside the layers, such as LoRA"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    headless = vocabulary and isinstance(base, PreTrainedModel) and base.get_output_embeddings() is None
    if not isinstance(base, PreTrainedModel) or headless or base.get_decoder() is base:
        needed = "a backbone and an output embedding" if vocabulary else "a backbone and a head"
        raise UserError(f"expected a Hugging Face causal LM ({needed}), got {type(base).__name__}")
    return base


def _check_rows(batch: Batch) -> None:
    if not batch.group_size:
        raise UserError("the batch holds prompts only: log-probs need completions, sample them first")
    empty = (~batch.prompt_mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise UserError(
            f"prompt {empty[0]} of the batch has no tokens, so nothing predicts the first token of its completions: "
            "give it a BOS token, or drop the row"
        )


def _head(causal: PreTrainedModel) -> nn.Module:
    head = causal.get_output_embeddings()
    assert head is not None  # `causal_lm` looked
    return head


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


# ---------------------------------------------------------------------------------------- what a model allows


@dataclass
class Anatomy:
    """What one model does to its logits, and which paths are exact for it.

    not_packed, not_cached: why a path is not; empty where it is. window: tokens a sliding-window layer looks back:
    longer sequences need dense. attention: the implementation this was found out under.
    """

    attention: str | None
    logit_map: LogitMap
    not_packed: str
    not_cached: str
    window: int | None
    told: bool = False


_anatomies: WeakKeyDictionary[nn.Module, Anatomy] = WeakKeyDictionary()


def _anatomy(causal: PreTrainedModel, forward: Callable[..., Any], batch: Batch) -> Anatomy:
    """Found out once per model with a forward of four tokens, so every rank of a sharded model does it together."""
    known = _anatomies.get(causal)
    if known is None or known.attention != causal.config._attn_implementation:
        fuse_lora(causal)
        token = batch.prompt_ids[batch.prompt_mask][:1]
        # Dropout draws in these forwards too; a resumed run makes them when its random state has been restored.
        with torch.random.fork_rng([token.device] if token.is_cuda else []):
            known = _anatomies[causal] = _examine(causal, forward, token)
    return known


def _examine(causal: PreTrainedModel, forward: Callable[..., Any], token: Tensor) -> Anatomy:
    config = causal.config.get_text_config()
    window, odd_layers = _attention_layers(config)
    logit_map = _logit_map(config)
    not_packed = odd_layers or _try_packed(causal, token)
    if causal.get_output_embeddings() is not None:
        _check_head(causal, forward, logit_map, token)
    return Anatomy(causal.config._attn_implementation, logit_map, not_packed, odd_layers or _not_cached(causal), window)


@torch.no_grad()
def _try_packed(causal: PreTrainedModel, token: Tensor) -> str:
    """Why the model cannot take a packed row, or "": does its attention reach `SharedRow.attend`, in every layer?"""
    if "position_ids" not in inspect.signature(causal.get_decoder().forward).parameters:
        return "its forward takes no position_ids"
    shared_attention.install()
    row = SharedRow([2], [[1, 1]], token.device)
    positions = torch.tensor([[0, 1, 2, 2]], device=token.device)
    try:
        # The backbone, as every path calls it: a classifier's own forward looks for padding in the row.
        causal.get_decoder()(
            input_ids=token.repeat(1, 4), position_ids=positions, use_cache=False, **_packed_arguments(row)
        )
    except (TypeError, ValueError, RuntimeError) as error:  # what a forward written for other masks answers with
        return f"its forward does not take a packed row ({type(error).__name__}: {error})"
    if row.foreign:
        return f"its attention uses {', '.join(sorted(row.foreign))}"
    if row.calls != causal.config.get_text_config().num_hidden_layers:
        return f"attention implementation {causal.config._attn_implementation!r} cannot share prompts"
    return ""


def _attention_layers(config: Any) -> tuple[int | None, str]:
    """(sliding window or None, why prompts cannot be shared or "")."""
    types = set(getattr(config, "layer_types", None) or ())
    if odd := types - {"full_attention", "sliding_attention"}:
        return None, f"it has layers of type {', '.join(sorted(odd))}"
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types or (not types and getattr(config, "use_sliding_window", True))
    return (window if slides else None), ""


def _not_cached(causal: PreTrainedModel) -> str:
    if _cache_argument(causal) is None:
        return "its forward takes no key-value cache"
    layers = DynamicCache(config=causal.config.get_text_config()).layers
    return "" if all(type(layer) is DynamicLayer for layer in layers) else "not all its layers have full attention"


def _cache_argument(causal: PreTrainedModel) -> str | None:
    """`past_key_values` until transformers 5.2x, `cache` since."""
    parameters = inspect.signature(causal.get_decoder().forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def _logit_map(config: Any) -> LogitMap:
    """The factors known by their configuration keys; `_check_head` finds out whether they are all there is."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return LogitMap(scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def _check_head(causal: PreTrainedModel, forward: Callable[..., Any], logit_map: LogitMap, token: Tensor) -> None:
    """Raise UserError unless the model's own logits are `logit_map` of its head on its backbone's last state."""
    states: list[Any] = []
    watch = causal.get_decoder().register_forward_hook(lambda _module, _args, output: states.append(output))
    try:
        theirs = forward(input_ids=token.repeat(1, 4), use_cache=False).logits.float()
    finally:
        watch.remove()
    hidden = getattr(states[-1], "last_hidden_state", None) if states else None
    if hidden is not None:
        ours = logit_map(_head(causal)(hidden)).float()
        scale = theirs.abs().max()
        tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 2e-2
        if ours.shape == theirs.shape and (ours - theirs).abs().max() <= tolerance * scale:
            return
    raise UserError(
        f"the logits of {type(causal).__name__} are not its output embedding applied to its backbone's last hidden "
        f"state (scale {logit_map.scale}, soft cap {logit_map.softcap}): its log-probs cannot be computed in chunks"
    )


def _choose(causal: PreTrainedModel, anatomy: Anatomy, batch: Batch, path: str) -> str:
    """The path to take. No FLOP count decides: packed does no more work than the others on any shape."""
    slides = _slides(batch, anatomy.window)
    reasons = {"packed": anatomy.not_packed or slides, "cache": anatomy.not_cached or slides, "dense": ""}
    if not reasons["cache"] and any(getattr(m, "gradient_checkpointing", False) for m in causal.modules()):
        reasons["cache"] = "activation checkpointing drops the key-value cache"
    if path != "auto":
        if reasons[path]:
            raise UserError(
                f"model.shared_prompt: {path} is not exact for {type(causal).__name__}: {reasons[path]}: "
                "type model.shared_prompt=auto"
            )
        return path
    if reasons["packed"] and not anatomy.told:
        anatomy.told = True
        _log.warning(
            "%s: %s. Log-probs are computed without packing: same numbers, slower",
            type(causal).__name__,
            reasons["packed"],
        )
    if not reasons["packed"]:
        return "packed"
    return "cache" if batch.group_size > 1 and not reasons["cache"] else "dense"


def _slides(batch: Batch, window: int | None) -> str:
    if window is None:
        return ""
    lengths = batch.prompt_mask.sum(1).repeat_interleave(batch.group_size) + batch.completion_mask.sum(1)
    longest = int(lengths.max())
    return f"a sequence has {longest} tokens, more than its sliding window of {window}" if longest > window else ""


def padding(model: nn.Module, batch: Batch, *, path: str = "auto") -> tuple[int, int]:
    """(positions of padding, all positions) that the layers compute for a batch's log-probs on the path it takes."""
    causal = causal_lm(model)
    taken = _choose(causal, _anatomy(causal, causal.forward, batch), batch, path)
    fed, (prompts, width), group = _fed(batch, True)[1], batch.prompt_mask.shape, batch.group_size
    lengths = batch.prompt_mask.sum(1).repeat_interleave(group) + fed.sum(1)
    once = int(batch.prompt_mask.sum() + fed.sum())
    real, computed = {
        "packed": (once, once),
        "cache": (once, prompts * width + fed.numel()),
        "dense": (int(lengths.sum()), len(lengths) * int(lengths.max())),
    }[taken]
    return computed - real, computed


# ---------------------------------------------------------------------------------------- the three paths


def _token_states(
    causal: PreTrainedModel, anatomy: Anatomy, batch: Batch, path: str, before: bool, neftune_alpha: float = 0.0
) -> Tensor:
    """(number of completion tokens, H): the last hidden state before, or at, each of them."""
    fed = _fed(batch, before)[1]
    noise = EmbeddingNoise.draw(causal, batch, fed, alpha=neftune_alpha) if neftune_alpha else None
    states = {"dense": _dense, "packed": _packed, "cache": _cached}[_choose(causal, anatomy, batch, path)]
    # Under autocast an adapter's product casts its input itself; PEFT would first blow it up to float32 and back.
    casts = torch.is_autocast_enabled(batch.prompt_ids.device.type)
    with disable_input_dtype_casting(causal) if casts else contextlib.nullcontext():
        return states(causal, batch, before, noise)


def _fed(batch: Batch, before: bool) -> tuple[Tensor, Tensor]:
    """Completion tokens that must go through the model: ids and mask (N, C or C - 1).

    The last token of a completion predicts nothing, so it is left out unless the state at it is asked for.
    """
    ids, mask = batch.completion_ids, batch.completion_mask
    return (ids[:, :-1], mask[:, 1:]) if before else (ids, mask)


def _dense(causal: PreTrainedModel, batch: Batch, before: bool, noise: EmbeddingNoise | None) -> Tensor:
    ids, mask = _fed(batch, before)
    # Prompt and completion side by side have padding on both ends: real tokens move to the left, the rest is cut off.
    grid = torch.cat([batch.prompt_mask.repeat_interleave(batch.group_size, 0), mask], 1)
    ids = torch.cat([batch.prompt_ids.repeat_interleave(batch.group_size, 0), ids], 1)
    lengths = grid.sum(1)
    real = torch.arange(int(lengths.max()), device=grid.device) < lengths[:, None]
    added = None
    if noise is not None:
        flat = torch.cat([noise.prompt, noise.completion], 1)[grid]
        added = flat.new_zeros(*real.shape, flat.shape[-1]).masked_scatter(real[..., None], flat)
    with noisy_embeddings(causal, added):
        hidden = causal.get_decoder()(
            input_ids=torch.zeros_like(real, dtype=ids.dtype).masked_scatter(real, ids[grid]),
            attention_mask=real.long(),
            position_ids=_positions(real),
            use_cache=False,
        ).last_hidden_state
    at = (grid.cumsum(1) - 1)[:, batch.prompt_mask.shape[1] - before :]
    at = at + torch.arange(len(at), device=at.device)[:, None] * real.shape[1]
    return hidden.flatten(0, 1).index_select(0, at[batch.completion_mask])


def _cached(causal: PreTrainedModel, batch: Batch, before: bool, noise: EmbeddingNoise | None) -> Tensor:
    name = _cache_argument(causal)
    assert name is not None
    cache = DynamicCache(config=causal.config.get_text_config())
    with noisy_embeddings(causal, noise and noise.prompt):
        first = causal.get_decoder()(
            input_ids=batch.prompt_ids,
            attention_mask=batch.prompt_mask.long(),
            position_ids=_positions(batch.prompt_mask),
            use_cache=True,
            **{name: cache},
        ).last_hidden_state[:, -1:]
    first = first.repeat_interleave(batch.group_size, 0)
    ids, mask = _fed(batch, before)
    if (
        ids.shape[1] == 0
    ):  # single tokens only: the second forward is still due, other ranks of a sharded model wait in it
        ids, mask = batch.completion_ids, torch.zeros_like(batch.completion_mask)
    cache.batch_repeat_interleave(batch.group_size)
    mask = torch.cat([batch.prompt_mask.repeat_interleave(batch.group_size, 0), mask], 1)
    with noisy_embeddings(causal, noise.completion if noise and noise.completion.shape[1] else None):
        hidden = causal.get_decoder()(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=_positions(mask)[:, -ids.shape[1] :],
            use_cache=True,
            **{name: cache},
        ).last_hidden_state
    width = batch.completion_mask.shape[1]
    return (torch.cat([first, hidden], 1)[:, :width] if before else hidden)[batch.completion_mask]


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def _packed(causal: PreTrainedModel, batch: Batch, before: bool, noise: EmbeddingNoise | None) -> Tensor:
    prompts, group = batch.prompt_mask.shape[0], batch.group_size
    ids, mask = _fed(batch, before)
    # A grid with a prompt and all its completions per line: its real entries, line by line, are the row.
    grid = torch.cat([batch.prompt_mask, mask.reshape(prompts, -1)], 1)
    lengths = batch.prompt_mask.sum(1)
    positions = lengths[:, None, None] + torch.arange(mask.shape[1], device=mask.device).expand(prompts, group, -1)
    row = SharedRow(lengths.tolist(), mask.sum(1).view(prompts, group).tolist(), mask.device)
    with noisy_embeddings(causal, noise and torch.cat([noise.prompt, noise.completion], 1)[grid][None]):
        hidden = causal.get_decoder()(
            input_ids=torch.cat([batch.prompt_ids, ids.reshape(prompts, -1)], 1)[grid][None],
            position_ids=torch.cat([_positions(batch.prompt_mask), positions.flatten(1)], 1)[grid][None],
            use_cache=False,
            **_packed_arguments(row),
        ).last_hidden_state[0]
    where = (grid.flatten().cumsum(0) - 1).view(prompts, -1)
    width = batch.prompt_mask.shape[1]
    at = where[:, width:].reshape(prompts * group, -1)
    if before:
        at = torch.cat([where[:, width - 1].repeat_interleave(group)[:, None], at], 1)
    return hidden.index_select(0, at[batch.completion_mask])


def _packed_arguments(row: SharedRow) -> dict[str, Any]:
    """A ready-made 4-D mask keeps the model from building one of T x T; `shared_row` takes its place."""
    return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.device), "shared_row": row}
