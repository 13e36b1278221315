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
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from alignment.model.head import upcast

IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
# Arguments that change the attention itself (logit soft-capping, sinks, relative positions): not computed here.
FOREIGN_ARGUMENTS = ("softcap", "s_aux", "position_bias")
# Attention scores computed at once on a CPU: large enough to hide the cost of a call, small enough for its cache.
BLOCK_SCORES = 1 << 21
BLOCK_ROWS = 128
# Scores per layer up to which their probabilities are kept for backward.
KEPT_SCORES = 1 << 23


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
        if query.dtype != torch.float64 and torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)  # as autocast does for torch's own attention
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if query.device.type == "cpu" and not dropout:
            blocks = self.blocks(query.shape[1])
            return _BlockAttention.apply(query, key, value, blocks, scale)
        return _padded_attention(self, query, key, value, scale, dropout)

    def blocks(self, num_heads: int) -> list[Block]:
        if num_heads not in self._blocks:
            self._blocks[num_heads] = list(_cut(self.segments, num_heads, self.num_tokens))
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
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if function is not None and not hasattr(function, "takes_shared_row"):
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

    queries: (count * rows) and keys: (count * own) positions in the row, as a slice where they follow each other. The
    last `rows` keys are the queries' own. real: (count, rows) bool, None where no segment is shorter than the others;
    store: where outputs go, padding to the spare position T.
    """

    prefix: slice
    count: int
    rows: int
    own: int
    queries: Tensor | slice
    keys: Tensor | slice
    store: Tensor | slice
    real: Tensor | None

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key, per head."""
        return self.count * self.rows * (self.prefix.stop - self.prefix.start + self.own)


def _cut(segments: Sequence[Segment], num_heads: int, spare: int) -> Iterator[Block]:
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
                yield _block(slice(prefix, prefix + prefix_length), reaching, first, last, spare)


def _block(prefix: slice, segments: Sequence[Segment], first: int, last: int, spare: int) -> Block:
    starts = torch.tensor([s.start for s in segments])[:, None]
    lengths = torch.tensor([s.length for s in segments])[:, None]
    own, rows = torch.arange(last), torch.arange(first, last)
    real = rows < lengths
    queries, keys = starts + torch.minimum(rows, lengths - 1), starts + torch.minimum(own, lengths - 1)
    store = _as_slice(torch.where(real, queries, spare))
    ragged = None if bool(real.all()) else real
    return Block(prefix, len(segments), last - first, last, _as_slice(queries), _as_slice(keys), store, ragged)


def _as_slice(positions: Tensor) -> Tensor | slice:
    """Positions that follow each other need no gathering."""
    positions = positions.flatten()
    first = int(positions[0])
    consecutive = torch.equal(positions, torch.arange(first, first + len(positions)))
    return slice(first, first + len(positions)) if consecutive else positions


class _BlockAttention(torch.autograd.Function):
    """Block by block: scores, softmax, values.

    torch's CPU attention kernel spends five times as long in backward as in forward and gains nothing from a mask.
    These are plain batched products, in which the query heads that share a key head form the rows.
    Scores, softmax and their gradients are float32, as in the fused kernel; probabilities and gradients are rounded to
    the model's dtype as factors of a product only. Probabilities of short rows are kept for backward, others computed
    again there.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block], scale: float) -> Tensor:
        q, k, v = _by_token(query, key.shape[1]), _by_token(key), _by_token(value)
        out = q.new_empty(q.shape[0] + 1, *q.shape[1:3], v.shape[-1])
        scaled = upcast(k) * scale
        keep = any(ctx.needs_input_grad) and sum(block.num_scores for block in blocks) * q.shape[1] <= KEPT_SCORES
        kept = []
        with torch.autocast("cpu", enabled=False):
            for block in blocks:
                probs = _probabilities(_rows(q, block), _keys(scaled, block), block).to(v.dtype)
                _put_rows(out, torch.bmm(probs, _keys(v, block)), block)
                if keep:
                    kept.append(probs)
        out = out[:-1]
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.blocks, ctx.scale = blocks, scale
        return out.flatten(1, 2)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept_probs = ctx.saved_tensors
        q, k, v = _by_token(query, key.shape[1]), _by_token(key), _by_token(value)
        scaled, v32, grad = upcast(k) * ctx.scale, upcast(v), grad[0].view(out.shape)
        # Softmax's backward needs each row's sum of probability * gradient, which is output * output gradient.
        inner = (upcast(grad) * out).sum(-1, keepdim=True)
        q_grad = q.new_empty(q.shape[0] + 1, *q.shape[1:])
        k_grad, v_grad = torch.zeros_like(scaled), torch.zeros_like(v32)
        for block, kept in zip(ctx.blocks, kept_probs or [None] * len(ctx.blocks), strict=True):
            rows, out_grad, row_inner = _rows(q, block), _rows(grad, block), _rows(inner, block)
            if block.real is not None:
                real = block.real.repeat(k.shape[1], q.shape[2]).view(len(rows), -1, 1)
                out_grad, row_inner = out_grad * real, row_inner * real
            probs = _probabilities(rows, _keys(scaled, block), block) if kept is None else kept
            _add_keys(v_grad, torch.bmm(probs.to(v.dtype).mT, out_grad), block)
            scores = torch.bmm(upcast(out_grad), _keys(v32, block).mT).sub_(row_inner).mul_(upcast(probs)).to(q.dtype)
            _add_keys(k_grad, torch.bmm(scores.mT, rows), block)
            _put_rows(q_grad, torch.bmm(scores, _keys(k, block)), block)
        q_grad = q_grad[:-1].flatten(1, 2).mul_(ctx.scale)
        grads = q_grad, k_grad.mul_(ctx.scale).to(k.dtype), v_grad.to(v.dtype)
        return *(g.transpose(0, 1)[None] for g in grads), None, None


def _by_token(x: Tensor, groups: int | None = None) -> Tensor:
    """(1, heads, T, D) -> (T, heads, D), or with `groups` (T, groups, heads / groups, D)."""
    x = x[0].transpose(0, 1)
    return x if groups is None else x.unflatten(1, (groups, -1))


def _take(x: Tensor, positions: Tensor | slice) -> Tensor:
    return x[positions] if isinstance(positions, slice) else x.index_select(0, positions)


def _rows(x: Tensor, block: Block) -> Tensor:
    """(T, K, R, D) -> (K * count, R * rows, D): R query heads of one key head side by side."""
    x = _take(x, block.queries).unflatten(0, (block.count, block.rows))
    return x.permute(2, 0, 3, 1, 4).reshape(x.shape[2] * block.count, -1, x.shape[-1])


def _put_rows(total: Tensor, x: Tensor, block: Block) -> None:
    """The way back of `_rows`, into (T + 1, K, R, D)."""
    x = x.view(total.shape[1], block.count, total.shape[2], block.rows, -1).permute(1, 3, 0, 2, 4)
    if isinstance(block.store, slice):
        total[block.store].unflatten(0, (block.count, block.rows)).copy_(x)
    else:
        total.index_copy_(0, block.store, x.flatten(0, 1))


def _keys(x: Tensor, block: Block) -> Tensor:
    """(T, K, D) -> (K * count, prefix + own, D)."""
    own = _take(x, block.keys).unflatten(0, (block.count, block.own)).permute(2, 0, 1, 3)
    prefix = x[block.prefix].transpose(0, 1)[:, None].expand(-1, block.count, -1, -1)
    return torch.cat([prefix, own], dim=2).flatten(0, 1)


def _add_keys(total: Tensor, x: Tensor, block: Block) -> None:
    """Add what each block's keys got, (K * count, prefix + own, D), to (T, K, D)."""
    x = x.unflatten(0, (-1, block.count))
    length = block.prefix.stop - block.prefix.start
    if length:
        total[block.prefix] += x[:, :, :length].sum(1, dtype=total.dtype).transpose(0, 1)
    own = x[:, :, length:].permute(1, 2, 0, 3)
    if isinstance(block.keys, slice):
        total[block.keys].unflatten(0, (block.count, block.own)).add_(own)
    else:
        total.index_add_(0, block.keys, own.flatten(0, 1).to(total.dtype))


def _probabilities(rows: Tensor, scaled_keys: Tensor, block: Block) -> Tensor:
    """Softmax over the prefix and the own tokens up to the query's, float32."""
    scores = torch.bmm(upcast(rows), scaled_keys.mT)
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
