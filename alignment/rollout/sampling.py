"""From logits to tokens: temperature, top-k, top-p and one uniform number per token.

A token is drawn by inverting the cumulative distribution at a number that is a pure function of (seed, completion,
position). So a completion depends on the seed and the weights, never on what else was in its batch, and nothing
touches torch's global generator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Vocabulary entries per block of the two-level search: a running sum over 200 blocks and 256 entries is far cheaper
# than one over 50,000.
BLOCK = 256
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, completion: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same three integers on every machine.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): each completion has its
    own stream, whose start is a hash of seed and completion, and `position` counts along it.
    """
    start = _mix(_mix(seed) + completion * _GOLDEN)
    return (_mix(start + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def sample(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: (R, V) logits of any float type, (R,) uniforms -> (R,) int64, (R,) float32.

    The log-prob is that of softmax(logits / temperature) over the whole vocabulary, also where top_k or top_p cut it
    off for the draw: it is what the trainer's log-probs are compared with. Temperature 0 takes the most likely token
    and gives its log-prob at temperature 1. Everything is computed in float32, sums in float64. A row whose logits are
    not finite gets log-prob NaN.
    """
    scaled = logits.float() if temperature in (0, 1) else logits.float() / temperature
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weights = shifted.exp()
    sums = _block_sums(weights)
    if temperature == 0:
        ids = logits.argmax(-1)
    elif top_k == 0 and top_p == 1.0:
        ids = draw(weights, uniforms, sums)
    else:
        ids = draw(truncate(weights, top_k=top_k, top_p=top_p), uniforms)
    logprobs = shifted.gather(-1, ids[:, None])[:, 0].double() - sums.sum(-1).log()
    return ids, logprobs.float()


def truncate(weights: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Zero the weights (R, V) of tokens that may not be drawn; the rest is left as it is.

    First top_k: the k largest of a row, and what equals the k-th. Then top_p (1904.09751): of those, the fewest largest
    ones whose share of the sum is at least top_p. 0 and 1.0 switch them off.
    """
    if 0 < top_k < weights.shape[-1]:
        weights = weights.where(weights >= weights.topk(top_k).values[:, -1:], 0.0)
    if top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().cumsum(-1)
        keep = mass - ordered < top_p * mass[:, -1:]
        weights = torch.zeros_like(weights).scatter(-1, order, ordered.where(keep, 0.0))
    return weights


def draw(weights: Tensor, uniforms: Tensor, sums: Tensor | None = None) -> Tensor:
    """Per row the first token at which the running sum of weights passes uniform * total: (R, V), (R,) -> (R,) int64.

    A token of weight 0 is never drawn, whatever rounding does.
    sums: `_block_sums(weights)`, where they are known already.
    """
    mass = (_block_sums(weights) if sums is None else sums).cumsum(-1)
    block, target = _first_above(mass, uniforms.to(mass) * mass[:, -1])
    before = mass.gather(-1, (block - 1).clamp_(min=0)).where(block > 0, 0.0)
    entries = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, entries.clamp(max=weights.shape[-1] - 1)).where(entries < weights.shape[-1], 0.0)
    entry, _ = _first_above(inside.double().cumsum(-1), (target - before)[:, 0])
    # With a NaN among the weights every comparison is false and the search ends behind the vocabulary.
    return (block * BLOCK + entry)[:, 0].clamp_(max=weights.shape[-1] - 1)


def _first_above(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Index (R, 1) of the first running sum above the target, and the target, brought between 0 and the last sum."""
    last = mass[:, -1].nextafter(mass.new_zeros(()))
    target = torch.minimum(target.clamp(min=0.0), last)[:, None]
    return torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1), target


def _block_sums(weights: Tensor) -> Tensor:
    """(R, V) -> (R, ceil(V / BLOCK)) float64. Sums of one block are taken in float32."""
    rows, vocabulary = weights.shape
    whole = vocabulary - vocabulary % BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1) if whole else weights.new_zeros(rows, 0)
    if whole < vocabulary:
        sums = F.pad(sums, (0, 1))
        sums[:, -1] = weights[:, whole:].sum(-1)
    return sums.double()
