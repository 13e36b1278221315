"""Log-probs of given tokens from hidden states, without ever holding tokens x vocabulary numbers.

The vocabulary is the widest place of a language model: 8 completions of 1,000 tokens over 150,000 words are 4.8 GB of
float32 logits, and a plain backward keeps them, their log-softmax and its gradient. Here rows go through the head
`chunk_tokens` at a time, and what is kept for backward is one vector per token (frozen head) or one number per token
(trained head).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from alignment.errors import UserError

STATISTICS = ("entropy", "log_sum_sq_probs", "is_top1", "vocab_mean")


@dataclass(frozen=True)
class LogitMap:
    """What a model does to the head's product z before the softmax: logits = scale * softcap * tanh(z / softcap).

    scale: Cohere's `logit_scale`, Granite's 1 / `logits_scaling`, and 1 / temperature.
    softcap: Gemma 2's `final_logit_softcapping`; None: no tanh.
    """

    scale: float = 1.0
    softcap: float | None = None

    def at_temperature(self, temperature: float) -> LogitMap:
        """The map of a policy sampled at this temperature. Raises UserError for one that is not > 0."""
        if not temperature > 0:
            raise UserError(f"temperature: {temperature}: greedy decoding has no log-probs: type a number above 0")
        return LogitMap(self.scale / temperature, self.softcap)

    def __call__(self, product: Tensor) -> Tensor:
        """float32 (or float64) logits of a head's product in any float type. In place on float32: pass a fresh one."""
        logits = upcast(product)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.scale == 1.0 else logits.mul_(self.scale)

    def slope(self, logits: Tensor) -> float | Tensor:
        """d logits / d product, from the logits."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (logits / (self.scale * self.softcap)) ** 2)


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def head_scores(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    logit_map: LogitMap = LogitMap(),
    chunk_tokens: int = 1024,
    stats: Collection[str] = (),
    entropy_grad: bool = False,
) -> dict[str, Tensor]:
    """Log-prob of each target under softmax(logit_map(head(hidden))), and statistics of that softmax.

    hidden (T, H), targets (T,) int64. Returns "logprobs" (T,) and each name in `stats`, (T,): "entropy" in nats,
    "log_sum_sq_probs" = log sum_v p_v^2, "is_top1" = no token has a larger logit (bool), "vocab_mean" = mean_v log p_v
    (label smoothing). float32, float64 for a float64 model. Log-probs and vocab_mean are differentiable; the others are
    detached, but for the entropy where `entropy_grad`.

    The product runs in the dtype autocast sets; softmax and what follows in float32. Rows are independent, so the
    result does not depend on the chunk, and values are the same with and without grad.

    A plain `nn.Linear` takes two products in all where its weight is frozen: d logprob / d hidden, which is
    W[y] - sum_v p_v W_v, is a row's own affair and is formed at once from the probabilities at hand. Where the weight
    is trained the logits are computed again in backward, four products. Any other head (an adapter on it, a quantised
    one), a differentiable entropy and vocab_mean go through activation checkpointing chunk by chunk.
    Raises ValueError for an unknown statistic.
    """
    unknown = set(stats) - set(STATISTICS)
    if unknown:
        raise ValueError(f"unknown statistics {sorted(unknown)}: choose from {', '.join(STATISTICS)}")
    names = ("entropy", *(s for s in stats if s != "entropy")) if entropy_grad else tuple(stats)

    forward = head.forward

    def scores(hidden: Tensor) -> tuple[Tensor, ...]:
        settings = targets, logit_map, chunk_tokens, names
        if entropy_grad or "vocab_mean" in names or not _is_plain_linear(head):
            return _checkpointed(hidden, forward, *settings, entropy_grad)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in head.parameters())
        return (_TrainedHead if trained else _FrozenHead).apply(hidden, head.weight, head.bias, *settings)

    return dict(zip(("logprobs", *names), as_forward_of(head, scores, hidden), strict=True))


def as_forward_of(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, run as `module`'s forward.

    Hooks that shard or cast a module's weights (FSDP2, DeepSpeed ZeRO-3, accelerate) fire on `module(...)`. Computing
    with a module's weights beside its forward would find them in pieces; this way it finds them whole.
    """
    before = vars(module).get("forward")
    module.forward = function
    try:
        return module(*args)
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _is_plain_linear(head: nn.Module) -> bool:
    """nn.Linear as it is: not a quantised or adapted subclass (FSDP2's subclass keeps the forward, so it counts)."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and type(head.weight.data) is Tensor


class _Chunk:
    """Softmax of one chunk of rows: all that forward and backward need, computed in the order that saves passes.

    The logits are shifted by their row maximum and exponentiated in place; they are never normalised: a row's sum is
    applied to its results instead.
    """

    def __init__(self, logits: Tensor, targets: Tensor, stats: Collection[str]) -> None:
        self.targets = targets[:, None]
        logits.sub_(logits.amax(-1, keepdim=True))
        shifted = logits.gather(-1, self.targets).squeeze(-1)
        self.exps = logits.exp() if "entropy" in stats else logits.exp_()
        self.sum = self.exps.sum(-1)
        self.logprobs = shifted - self.sum.log()
        self.stats = [getattr(self, f"_{name}")(logits, shifted) for name in stats]

    def _entropy(self, logits: Tensor, shifted: Tensor) -> Tensor:
        return self.sum.log() - torch.linalg.vecdot(self.exps, logits) / self.sum

    def _log_sum_sq_probs(self, logits: Tensor, shifted: Tensor) -> Tensor:
        return torch.linalg.vecdot(self.exps, self.exps).log() - 2 * self.sum.log()

    def _is_top1(self, logits: Tensor, shifted: Tensor) -> Tensor:
        return shifted >= 0

    def towards_target(self) -> Tensor:
        """`exps` turned into (onehot - p) * sum; 1 - p by expm1, so that a confident token keeps its small gradient."""
        return self.exps.neg_().scatter_(-1, self.targets, (-self.sum * self.logprobs.expm1())[:, None])


class _FrozenHead(torch.autograd.Function):
    """Head whose weight gets no gradient: forward keeps d logprob / d hidden, (T, H), and backward is one product."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        logit_map: LogitMap,
        chunk_tokens: int,
        stats: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        operands = _operands(hidden, weight, bias)
        columns, slopes = _forward_chunks(operands, targets, logit_map, chunk_tokens, stats, ctx.needs_input_grad[0])
        ctx.save_for_backward(*slopes)
        ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(*columns[1:])
        return tuple(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        directions, lengths = ctx.saved_tensors
        return ((grad * lengths)[:, None] * directions).to(ctx.hidden_dtype), *[None] * 6


class _TrainedHead(torch.autograd.Function):
    """Head whose weight is trained: forward keeps no more than its inputs, backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        logit_map: LogitMap,
        chunk_tokens: int,
        stats: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        operands = _operands(hidden, weight, bias)
        columns, _ = _forward_chunks(operands, targets, logit_map, chunk_tokens, stats, False)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = operands[1].dtype, logit_map, chunk_tokens
        ctx.mark_non_differentiable(*columns[1:])
        return tuple(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        dtype, logit_map, chunk_tokens = ctx.settings
        h, w, b = (None if x is None else x.to(dtype) for x in (hidden, weight, bias))
        assert h is not None
        assert w is not None
        hidden_grad, weight_grad, bias_grad = (
            torch.zeros_like(x) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for rows in _chunks(len(h), chunk_tokens):
            logits = logit_map(F.linear(h[rows], w, b))
            slope = logit_map.slope(logits)
            chunk = _Chunk(logits, targets[rows], ())
            coefficients = chunk.towards_target().mul_((grad[rows] / chunk.sum)[:, None]).mul_(slope)
            if bias_grad is not None:
                bias_grad += coefficients.sum(0)
            coefficients = coefficients.to(dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = (coefficients @ w).to(hidden.dtype)
            if weight_grad is not None:
                weight_grad += coefficients.T @ h[rows]
        return hidden_grad, weight_grad, bias_grad, *[None] * 4


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype the product runs in: what autocast would make of them, cast once and not chunk by chunk."""
    device, dtype = hidden.device.type, weight.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _forward_chunks(
    operands: tuple[Tensor, Tensor, Tensor | None],
    targets: Tensor,
    logit_map: LogitMap,
    chunk_tokens: int,
    stats: tuple[str, ...],
    with_slopes: bool,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Log-probs and statistics, (T,) each, and where asked d logprob / d hidden as `_row_slopes` gives it."""
    hidden, weight, bias = operands
    columns = _empty_columns(len(hidden), upcast(hidden[:0]), stats)
    slopes = (torch.empty_like(hidden), torch.empty_like(columns[0])) if with_slopes else ()
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = logit_map(F.linear(hidden[rows], weight, bias))
            slope = logit_map.slope(logits) if with_slopes else 1.0
            chunk = _Chunk(logits, targets[rows], stats)
            for column, value in zip(columns, (chunk.logprobs, *chunk.stats), strict=True):
                column[rows] = value
            for column, value in zip(slopes, _row_slopes(chunk, slope, weight) if with_slopes else (), strict=True):
                column[rows] = value
    return columns, slopes


def _row_slopes(chunk: _Chunk, slope: float | Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(W[y] - sum_v p_v W_v) * slope of the chunk's rows, as directions (n, H) and their factors (n,).

    Coefficients reach the product unnormalised, as exp(z - max): largest entry 1, well inside bfloat16. float16 has too
    few exponents for a confident row, whose other entries are all tiny: each row is scaled to a target entry of 1.
    Factors stay apart, and float32: multiplied in, they would round the directions once more, and underflow float16.
    """
    coefficients, norm = chunk.towards_target(), chunk.sum
    if weight.dtype == torch.float16:
        rest = (-chunk.logprobs.expm1()).clamp_min(torch.finfo(torch.float32).eps)
        coefficients, norm = coefficients.div_((rest * norm)[:, None]), 1 / rest
    if isinstance(slope, Tensor):
        coefficients, slope = coefficients.mul_(slope), 1.0
    return coefficients.to(weight.dtype) @ weight, slope / norm


def _checkpointed(
    hidden: Tensor,
    forward: Callable[[Tensor], Tensor],
    targets: Tensor,
    logit_map: LogitMap,
    chunk_tokens: int,
    stats: tuple[str, ...],
    entropy_grad: bool,
) -> tuple[Tensor, ...]:
    """Any head: logits of a chunk are dropped after forward and computed again in backward."""

    def run(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logprobs = F.log_softmax(logit_map(forward(h)), dim=-1)
        target = logprobs.gather(-1, y[:, None]).squeeze(-1)
        return target, *(_statistic(name, logprobs, target, entropy_grad) for name in stats)

    chunks = [
        checkpoint(run, hidden[rows], targets[rows], use_reentrant=False) for rows in _chunks(len(hidden), chunk_tokens)
    ]
    if not chunks:
        return upcast(hidden.sum(-1)), *_empty_columns(0, upcast(hidden), stats)[1:]
    return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


def _statistic(name: str, logprobs: Tensor, target: Tensor, entropy_grad: bool) -> Tensor:
    if name == "entropy":
        logprobs = logprobs if entropy_grad else logprobs.detach()
        return -torch.linalg.vecdot(logprobs.exp(), logprobs)
    if name == "vocab_mean":
        return logprobs.mean(-1)
    logprobs, target = logprobs.detach(), target.detach()
    return (2 * logprobs).logsumexp(-1) if name == "log_sum_sq_probs" else target >= logprobs.amax(-1)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _empty_columns(length: int, like: Tensor, stats: Collection[str]) -> list[Tensor]:
    return [
        like.new_empty(length, dtype=torch.bool if name == "is_top1" else like.dtype) for name in ("logprobs", *stats)
    ]
