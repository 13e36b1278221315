"""Two models' next-token distributions over the completions of a batch, without both whole vocabularies at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alignment.batch import Batch
from alignment.model.head import as_forward_of
from alignment.model.logprobs import completion_states, vocabulary_head

# (logits of one model, of the other), both (n, V) -> values (n,) with gradient, and statistics (n,).
Compare = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def compare_tokens(
    student: nn.Module,
    teacher: nn.Module,
    batch: Batch,
    compare: Compare,
    *,
    paths: tuple[str, str] = ("auto", "auto"),
    chunk_tokens: int = 1024,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`compare(student's logits, teacher's logits)` at every token of `batch.loss_mask`; (N, C), 0 elsewhere.

    The logits predict the token, as in `completion_logprobs`; only the student's get a gradient. They are float32, cut
    to the vocabulary that both heads have (heads are padded to round sizes), and computed again in backward, chunk by
    chunk: what is kept are two vectors per token. paths: how each model gets its hidden states. Both models must read
    token ids the same way.
    """
    wanted = batch.loss_mask[batch.completion_mask]
    with torch.no_grad():
        theirs = completion_states(teacher, batch, path=paths[1])[wanted]
    mine = completion_states(student, batch, path=paths[0])[wanted]
    (head, logit_map), (other_head, other_map) = vocabulary_head(student, batch), vocabulary_head(teacher, batch)
    forward, other_forward = head.forward, other_head.forward
    names: list[str] = []

    def run(mine: Tensor, theirs: Tensor) -> tuple[Tensor, ...]:
        logits, other = logit_map(forward(mine)), other_map(other_forward(theirs)).detach()
        width = min(logits.shape[-1], other.shape[-1])
        values, stats = compare(logits[..., :width], other[..., :width])
        names[:] = stats
        return values, *stats.values()

    # A divergence holds some four times as many vocabularies as a log-prob does.
    size = max(1, chunk_tokens // 4)

    def columns(mine: Tensor) -> list[tuple[Tensor, ...]]:
        parts = zip(mine.split(size), theirs.split(size), strict=True)  # one empty part where there are no tokens
        return [checkpoint(run, *part, use_reentrant=False) for part in parts]  # type: ignore[misc]

    chunks = as_forward_of(head, lambda mine: as_forward_of(other_head, columns, mine), mine)
    values, *stats = (_spread(torch.cat(column), batch.loss_mask) for column in zip(*chunks, strict=True))
    return values, dict(zip(names, stats, strict=True))


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
