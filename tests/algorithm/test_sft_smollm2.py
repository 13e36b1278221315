"""Packing on the real model: the loss and the gradient of rows fed one by one to transformers, and no padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from alignment.batch import Example, collate
from alignment.data.datamodule import StepStream
from alignment.losses.reduce import reduce_loss
from alignment.losses.sft import nll
from alignment.model.logprobs import completion_logprobs, padding
from alignment.model.smollm2 import SmolLM2

# Rows of 20 to 220 tokens, an eighth to a half of them prompt.
LENGTHS = [20, 220, 47, 133, 75, 161, 98, 188]


def rows(lengths: list[int], vocab: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab, (count,), generator=generator).tolist()

    shares = torch.rand(len(lengths), generator=generator) * 0.375 + 0.125
    prompts = [max(1, int(share * length)) for share, length in zip(shares, lengths, strict=True)]
    return [Example(tokens(p), [tokens(n - p)]) for p, n in zip(prompts, lengths, strict=True)]


def unpacked(model: nn.Module, examples: list[Example]) -> Tensor:
    """transformers' own loss of each row alone, weighted by its tokens."""
    losses, count = [], 0
    for example in examples:
        ids = torch.tensor([example.prompt_ids + example.completions[0]])
        labels = ids.clone()
        labels[0, : len(example.prompt_ids)] = -100
        num_tokens = len(example.completions[0])
        losses.append(model(input_ids=ids, labels=labels).loss * num_tokens)
        count += num_tokens
    return torch.stack(losses).sum() / count


def gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_packed_loss_and_gradient_equal_unpacked() -> None:
    source = SmolLM2(adapter="none")
    model = source.policy()
    examples = rows(LENGTHS, len(source.tokenizer))
    wanted = unpacked(model, examples)
    wanted_gradient = gradient(model, wanted)
    assert sum(g.numel() for g in wanted_gradient.values()) > 134_000_000  # every weight has one
    norm = torch.stack([g.norm() for g in wanted_gradient.values()]).norm()
    for path in ("packed", "dense"):
        batch = collate(examples)
        loss = reduce_loss(nll(completion_logprobs(model, batch, path=path).logprobs), batch.loss_mask)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        got = gradient(model, loss)
        gap = torch.stack([(got[name] - wanted_gradient[name]).norm() for name in wanted_gradient]).norm()
        print(f"{path}: loss {loss.item():.7f}, {wanted.item():.7f} row by row; gradient {float(gap / norm):.1e} apart")
        assert gap <= 1e-5 * norm


@pytest.mark.slow
def test_rows_of_20_to_220_tokens_leave_no_padding_packed_and_little_grouped() -> None:
    source = SmolLM2()
    model = source.policy()
    lengths = torch.randint(20, 221, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    examples = rows(lengths, len(source.tokenizer))
    sizes = {"batch_size": 16, "microbatch_size": 8, "total_steps": 64, "rank": 0, "world_size": 1, "seed": 0}
    shares = {}
    for path, window in (("auto", 1), ("dense", 1), ("dense", 4), ("dense", 16)):
        steps = StepStream(examples, **sizes, length_window=window)
        padded, computed = zip(*(padding(model, steps[i], path=path) for i in range(len(steps))), strict=True)
        shares[path, window] = sum(padded) / sum(computed)
    print({f"{path}, window {window}": f"{share:.1%}" for (path, window), share in shares.items()})
    assert shares["auto", 1] == 0
    assert shares["dense", 16] < 0.05
