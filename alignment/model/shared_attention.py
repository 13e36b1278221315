"""Attention over a row that holds each prompt once, followed by all its completions.

A plain attention call over such a row needs a mask and computes every pair of tokens, also those of two different
completions: its work grows with the square of the row. Here the row is cut along its structure, so that a completion
meets its prompt and itself only: the work of separate sequences, while every other layer of the model sees each token
once and no padding.

It reaches a model through the registry in which Hugging Face models look up their attention function, and only for
calls that carry a `SharedRow`: every other call goes to the function that was there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from alignment.model.head import upcast

IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
# Arguments that change the attention itself (logit soft-capping, sinks, relative positions): not computed here.
FOREIGN_ARGUMENTS = ("softcap", "s_aux", "position_bias")
# Attention scores computed at once on a CPU: large enough to hide the cost of a call, small enough for its cache.
BLOCK_SCORES = 1 << 21
BLOCK_ROWS = 128


class Segment(NamedTuple):
    """Tokens [start, start + length) of the row attend to a prefix [prefix, prefix + prefix_length) and themselves."""

    prefix: int
    prefix_length: int
    start: int
    length: int


class SharedRow:
    """One row of T tokens: prompt 0, its completions, prompt 1, its completions, ... without padding.

    prompt_lengths: B lengths. completion_lengths: for each prompt the lengths of its completions, 0 allowed.
    `attend` counts its calls, and keeps in `foreign` the arguments it was given and cannot honour: how
    `logprobs.py` finds out whether a model's attention really comes here.
    """

    def __init__(
        self, prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], device: torch.device | str
    ) -> None:
        self.prompt_lengths, self.completion_lengths = list(prompt_lengths), [list(c) for c in completion_lengths]
        self.device = torch.device(device)
        self.num_tokens = sum(self.prompt_lengths) + sum(map(sum, self.completion_lengths))
        self.calls = 0
        self.foreign: set[str] = set()

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """A prompt with a single completion is one segment: there is nothing to share."""
        segments, start = [], 0
        for prompt, completions in zip(self.prompt_lengths, self.completion_lengths, strict=True):
            if len(completions) == 1:
                segments.append(Segment(start, 0, start, prompt + completions[0]))
                start += prompt + completions[0]
                continue
            prefix = start
            segments.append(Segment(start, 0, start, prompt))
            start += prompt
            for length in completions:
                segments.append(Segment(prefix, prompt, start, length))
                start += length
        return [segment for segment in segments if segment.length]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float = 0.0, **other: Any
    ) -> Tensor:
        """query (1, Q, T, D), key (1, K, T, D), value (1, K, T, E), Q a multiple of K -> (1, T, Q, E)."""
        self.calls += 1
        self.foreign |= {name for name in FOREIGN_ARGUMENTS if other.get(name) is not None}
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if query.device.type == "cpu" and not dropout:
            blocks = self.blocks(query.shape[1])
            return _BlockAttention.apply(query, key, value, blocks, scale)
        return _padded_attention(self, query, key, value, scale, dropout)

    def blocks(self, num_heads: int) -> list[Block]:
        if num_heads not in self._blocks:
            self._blocks[num_heads] = list(_cut(self.segments, num_heads, self.num_tokens, self.device))
        return self._blocks[num_heads]

    @functools.cached_property
    def _blocks(self) -> dict[int, list[Block]]:
        return {}

    @functools.cached_property
    def padded(self) -> Padded:
        return Padded.of(self.segments, self.num_tokens, self.device)


def install() -> None:
    """Let the registered attention functions take a `shared_row`. Doing it twice changes nothing."""
    for name in IMPLEMENTATIONS:
        function = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(function, "takes_shared_row"):
            AttentionInterface.register(name, _taking_shared_row(function))


def _taking_shared_row(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        shared_row: SharedRow | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if shared_row is None:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        return shared_row.attend(query, key, value, kwargs.pop("scaling", None), **kwargs), None

    attention.takes_shared_row = True  # type: ignore[attr-defined]
    return attention


# ---------------------------------------------------------------------------------------- on a CPU


class Block(NamedTuple):
    """`rows` successive queries of each of `count` segments that see the same prefix.

    queries (count * rows) and keys (count * own): positions in the row; the last `rows` keys are the queries' own.
    store: `queries`, with padding sent to the spare position T. real: (count, rows) bool, None where all are.
    """

    prefix: slice
    count: int
    rows: int
    own: int
    queries: Tensor
    keys: Tensor
    store: Tensor
    real: Tensor | None


def _cut(segments: Sequence[Segment], num_heads: int, spare: int, device: torch.device) -> Iterator[Block]:
    """Group segments of one prefix, longest first, into blocks of about BLOCK_SCORES scores."""
    by_prefix: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        key = (segment.prefix, segment.prefix_length) if segment.prefix_length else (0, 0)
        by_prefix.setdefault(key, []).append(segment)
    for (prefix, prefix_length), group in by_prefix.items():
        group.sort(key=lambda segment: -segment.length)
        while group:
            longest = group[0].length
            scores = num_heads * min(longest, BLOCK_ROWS) * (prefix_length + longest)
            taken = max(1, BLOCK_SCORES // scores)
            # A much shorter segment would be mostly padding: it waits for its equals.
            alike = [s for s in group[:taken] if 2 * s.length > longest]
            group = group[len(alike) :]
            for first in range(0, longest, BLOCK_ROWS):
                last = min(first + BLOCK_ROWS, longest)
                reaching = [s for s in alike if s.length > first]
                yield _block(slice(prefix, prefix + prefix_length), reaching, first, last, spare, device)


def _block(
    prefix: slice, segments: Sequence[Segment], first: int, last: int, spare: int, device: torch.device
) -> Block:
    starts = torch.tensor([s.start for s in segments])[:, None]
    lengths = torch.tensor([s.length for s in segments])[:, None]
    own, rows = torch.arange(last), torch.arange(first, last)
    real = rows < lengths
    queries = starts + torch.minimum(rows, lengths - 1)
    return Block(
        prefix,
        len(segments),
        last - first,
        last,
        queries.flatten().to(device),
        (starts + torch.minimum(own, lengths - 1)).flatten().to(device),
        torch.where(real, queries, spare).flatten().to(device),
        None if bool(real.all()) else real.to(device),
    )


class _BlockAttention(torch.autograd.Function):
    """Block by block: scores, softmax, values; backward computes the probabilities again (FlashAttention's idea).

    torch's CPU attention kernel spends five times as long in backward as in forward and gains nothing from a mask. These
    are plain batched products, in which the query heads that share a key head, and their completions, form the rows.
    Precision is that of the fused kernel: scores, softmax and their gradients in float32; probabilities and gradients
    are rounded to the model's dtype only as factors of a product.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block], scale: float) -> Tensor:
        q, k, v = _by_token(query, key.shape[1]), _by_token(key), _by_token(value)
        out = q.new_empty(q.shape[0] + 1, *q.shape[1:3], v.shape[-1])
        with torch.autocast("cpu", enabled=False):
            for block in blocks:
                values = _keys(v, block)
                probs = _probabilities(_queries(q, block), _keys(k, block), block, scale)
                out.index_copy_(0, block.store, _tokens(torch.bmm(probs.to(values.dtype), values), block, out.shape))
        out = out[:-1]
        ctx.save_for_backward(query, key, value, out)
        ctx.blocks, ctx.scale = blocks, scale
        return out.flatten(1, 2)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out = ctx.saved_tensors
        q, k, v = _by_token(query, key.shape[1]), _by_token(key), _by_token(value)
        grad = grad[0].view(out.shape)
        # Softmax's backward needs each row's sum of probability * gradient, which is output * output gradient.
        inner = (upcast(grad) * upcast(out)).sum(-1, keepdim=True)
        q_grad = q.new_empty(q.shape[0] + 1, *q.shape[1:])
        k_grad, v_grad = (torch.zeros_like(upcast(x), memory_format=torch.contiguous_format) for x in (k, v))
        for block in ctx.blocks:
            queries, keys, values = _queries(q, block), _keys(k, block), _keys(v, block)
            out_grad, row_inner = _queries(grad, block), _queries(inner, block)
            if block.real is not None:
                real = block.real.repeat(k.shape[1], q.shape[2]).view(len(queries), -1, 1)
                out_grad, row_inner = out_grad * real, row_inner * real
            probs = _probabilities(queries, keys, block, ctx.scale)
            _add_keys(v_grad, torch.bmm(probs.to(v.dtype).mT, out_grad), block)
            scores = torch.bmm(upcast(out_grad), upcast(values).mT).sub_(row_inner).mul_(probs).mul_(ctx.scale)
            scores = scores.to(q.dtype)
            _add_keys(k_grad, torch.bmm(scores.mT, queries), block)
            q_grad.index_copy_(0, block.store, _tokens(torch.bmm(scores, keys), block, q_grad.shape))
        q_grad, k_grad, v_grad = q_grad[:-1].flatten(1, 2), k_grad.to(k.dtype), v_grad.to(v.dtype)
        return *(g.transpose(0, 1)[None] for g in (q_grad, k_grad, v_grad)), None, None


def _by_token(x: Tensor, groups: int | None = None) -> Tensor:
    """(1, heads, T, D) -> (T, heads, D), or with `groups` (T, groups, heads / groups, D)."""
    x = x[0].transpose(0, 1)
    return x if groups is None else x.unflatten(1, (groups, -1))


def _queries(x: Tensor, block: Block) -> Tensor:
    """(T, K, R, D) -> (K * count, R * rows, D): R query heads of one key head side by side."""
    x = x.index_select(0, block.queries).unflatten(0, (block.count, block.rows))
    return x.permute(2, 0, 3, 1, 4).flatten(2, 3).flatten(0, 1)


def _tokens(x: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """The way back of `_queries`: (K * count, R * rows, D) -> (count * rows, K, R, D)."""
    x = x.view(shape[1], block.count, shape[2], block.rows, -1)
    return x.permute(1, 3, 0, 2, 4).flatten(0, 1)


def _keys(x: Tensor, block: Block) -> Tensor:
    """(T, K, D) -> (K * count, prefix + own, D)."""
    own = x.index_select(0, block.keys).unflatten(0, (block.count, block.own)).permute(2, 0, 1, 3)
    prefix = x[block.prefix].transpose(0, 1)[:, None].expand(-1, block.count, -1, -1)
    return torch.cat([prefix, own], dim=2).flatten(0, 1)


def _add_keys(total: Tensor, x: Tensor, block: Block) -> None:
    """Add what each block's keys got, (K * count, prefix + own, D), to (T, K, D)."""
    x = x.unflatten(0, (-1, block.count))
    length = block.prefix.stop - block.prefix.start
    total[block.prefix] += x[:, :, :length].sum(1, dtype=total.dtype).transpose(0, 1)
    own = x[:, :, length:].permute(1, 2, 0, 3).flatten(0, 1)
    total.index_add_(0, block.keys, own.to(total.dtype))


def _probabilities(queries: Tensor, keys: Tensor, block: Block, scale: float) -> Tensor:
    """Softmax over the prefix and the own tokens up to the query's, float32."""
    scores = torch.bmm(upcast(queries) * scale, upcast(keys).mT)
    later = torch.full((block.rows, block.rows), -torch.inf, dtype=scores.dtype).triu_(1)
    scores.unflatten(1, (-1, block.rows))[..., -block.rows :] += later
    return scores.softmax(-1)


# ---------------------------------------------------------------------------------------- elsewhere


@dataclass(frozen=True)
class Padded:
    """Indices that lay a row out as padded sequences for `scaled_dot_product_attention`, and back.

    plain (S, L): the segments without a prefix, right-padded: causal attention needs no mask.
    prefix (N, P), own (N, C): those with one, and mask (N, 1, C, P + C) bool.
    back (T,): where the row's tokens are in [plain | own], flattened.
    """

    plain: Tensor
    prefix: Tensor
    own: Tensor
    mask: Tensor
    back: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], num_tokens: int, device: torch.device) -> Padded:
        alone = [s for s in segments if not s.prefix_length]
        after = [s for s in segments if s.prefix_length]
        plain, plain_real = _grid([(s.start, s.length) for s in alone])
        prefix, prefix_real = _grid([(s.prefix, s.prefix_length) for s in after])
        own, own_real = _grid([(s.start, s.length) for s in after])
        causal = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool).tril_().expand(len(own), -1, -1)
        mask = torch.cat([prefix_real[:, None].expand(-1, own.shape[1], -1), causal], dim=-1)
        tokens = torch.cat([plain.flatten(), own.flatten()])
        real = torch.cat([plain_real.flatten(), own_real.flatten()])
        back = torch.empty(num_tokens, dtype=torch.long)
        back[tokens[real]] = real.nonzero().squeeze(-1)
        return cls(*(x.to(device) for x in (plain, prefix, own, mask[:, None], back)))


def _grid(spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Positions of each span, right-padded by repeating its last: (S, longest) int64, and which are real."""
    starts, lengths = torch.tensor(spans, dtype=torch.long).reshape(-1, 2, 1).unbind(1)
    steps = torch.arange(int(lengths.max()) if len(spans) else 0)
    return starts + torch.minimum(steps, lengths - 1), steps < lengths


def _padded_attention(
    row: SharedRow, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    layout = row.padded

    def take(x: Tensor, index: Tensor) -> Tensor:
        return x[0][:, index].transpose(0, 1)  # (1, heads, T, D) -> (sequences, heads, length, D)

    attention = functools.partial(F.scaled_dot_product_attention, scale=scale, dropout_p=dropout)
    parts = [attention(*(take(x, layout.plain) for x in (query, key, value)), is_causal=True)]
    if len(layout.own):
        index = torch.cat([layout.prefix, layout.own], dim=1)
        q, k, v = take(query, layout.own), take(key, index), take(value, index)
        parts.append(attention(q, k, v, attn_mask=layout.mask))
    flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return flat.index_select(0, layout.back)[None]
