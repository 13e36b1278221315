"""SFT's step against full logits: losses, both means, smoothing, DFT, noise, held-out perplexity."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from alignment.algorithm.sft import SFT
from alignment.batch import Batch, Example, collate
from alignment.losses.sft import label_smoothed_nll
from alignment.model.logprobs import completion_logprobs
from alignment.ref_strategy.none import NoReference

COMMON: dict[str, Any] = {
    "batch_size": 4,
    "num_epochs": 1,
    "max_steps": None,
    "microbatch_size": 4,
    "lr": 1e-3,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
}
PLAIN: dict[str, Any] = {"loss": "nll", "loss_mean": "token", "label_smoothing": 0.0, "neftune_alpha": 0.0}
# Prompts and completions of several lengths; in the third row only the last two tokens count.
ROWS = [
    Example([5, 6, 7], [[8, 9, 10, 2]]),
    Example([11], [[12, 2]]),
    Example([13, 14, 15, 16, 17], [[18, 19, 20, 21, 22, 2]], [[False] * 4 + [True] * 2]),
    Example([23, 24], [[25]]),
]


def module(policy: LlamaForCausalLM, *, training: bool = True, accumulate: int = 1, **options: Any) -> SFT:
    source = SimpleNamespace(shared_prompt="auto", head_chunk_tokens=3)
    made = SFT(source, NoReference(), functools.partial(torch.optim.SGD), [], **COMMON, **(PLAIN | options))
    made.policy = policy
    trainer = SimpleNamespace(
        training=training,
        accumulate_grad_batches=accumulate,
        world_size=1,
        precision_plugin=SimpleNamespace(forward_context=contextlib.nullcontext),
    )
    made.__dict__["kept_trainer"] = trainer  # Lightning itself keeps a weak reference only
    made.trainer = trainer  # type: ignore[assignment]
    return made


def logits_and_labels(model: LlamaForCausalLM, row: Example) -> tuple[Tensor, Tensor]:
    """Of the tokens that count, from a forward of the row alone."""
    ids = torch.tensor([row.prompt_ids + row.completions[0]])
    first = len(row.prompt_ids)
    keep = torch.tensor(row.loss_masks[0] if row.loss_masks else [True] * len(row.completions[0]))
    return model(input_ids=ids).logits[0, first - 1 : -1][keep], ids[0, first:][keep]


def per_row(model: LlamaForCausalLM, row: Example, options: dict[str, Any]) -> Tensor:
    logits, labels = logits_and_labels(model, row)
    logprobs = logits.log_softmax(-1)[range(len(labels)), labels]
    if options.get("loss") == "dft":
        return -(logprobs.detach().exp() * logprobs)
    return label_smoothed_nll(logits, labels, label_smoothing=options.get("label_smoothing", 0.0))


def gradients(model: LlamaForCausalLM, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", [{}, {"loss": "dft"}, {"label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("mean", ["token", "example"])
def test_loss_and_gradient_are_those_of_full_logits(
    tiny_llama: LlamaForCausalLM, options: dict[str, Any], mean: str
) -> None:
    rows = [per_row(tiny_llama, row, options) for row in ROWS]
    # 4 + 2 + 2 + 1 tokens that count, or four rows
    wanted = torch.cat(rows).sum() / 9 if mean == "token" else torch.stack([row.mean() for row in rows]).sum() / 4
    loss = module(tiny_llama, loss_mean=mean, **options).training_step(collate(ROWS), 0)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(gradients(tiny_llama, loss), gradients(tiny_llama, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)  # sums of some hundred float32 products


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"loss": "dft"}, {"loss_mean": "example"}, {"neftune_alpha": 5.0}], ids=str
)
def test_the_cut_into_microbatches_changes_nothing(tiny_llama: LlamaForCausalLM, options: dict[str, Any]) -> None:
    def step(size: int) -> tuple[float, list[Tensor]]:
        """Shares of the step's loss, divided by the accumulation as Lightning does."""
        torch.manual_seed(1)  # of the noise
        accumulate = len(ROWS) // size
        sft = module(tiny_llama, accumulate=accumulate, **options)
        total = torch.zeros(())
        for first in range(0, len(ROWS), size):
            batch = collate(ROWS[first : first + size])
            batch.step_tokens, batch.step_examples = 9.0, 4.0
            total = total + sft.training_step(batch, first) / accumulate
        assert sft.meter.flush()["train/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        return float(total.detach()), gradients(tiny_llama, total)

    whole, whole_gradients = step(4)
    for size in (2, 1):
        loss, others = step(size)
        assert loss == pytest.approx(whole, rel=1e-5)
        for ours, theirs in zip(others, whole_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_perplexity_is_of_the_whole_held_out_set(tiny_llama: LlamaForCausalLM) -> None:
    """Batches of 6 and 3 tokens: exp of the mean over 9, neither a mean of exps nor of the batches' means."""
    sft = module(tiny_llama, training=False, loss="dft", neftune_alpha=10.0)
    for rows in (ROWS[:2], ROWS[2:]):
        sft.validation_step(collate(rows), 0)
    metrics = sft.meter.flush()
    pairs = [logits_and_labels(tiny_llama, row) for row in ROWS]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    nll = float(torch.nn.functional.cross_entropy(logits, labels).detach())
    assert metrics["val/nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert metrics["val/token_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    weighted = [float(per_row(tiny_llama, row, {"loss": "dft"}).sum().detach()) for row in ROWS]
    assert metrics["val/loss"] == pytest.approx(sum(weighted) / 9, rel=1e-5)


def test_noise_acts_in_training_only_and_follows_the_global_generator(tiny_llama: LlamaForCausalLM) -> None:
    def loss(seed: int, **options: Any) -> float:
        torch.manual_seed(seed)
        return float(module(tiny_llama, **options).training_step(collate(ROWS), 0).detach())

    plain = loss(0)
    assert loss(0, neftune_alpha=5.0) == loss(0, neftune_alpha=5.0)
    assert len({plain, loss(0, neftune_alpha=5.0), loss(1, neftune_alpha=5.0)}) == 3
    assert loss(0, neftune_alpha=5.0, training=False) == loss(0, training=False) == plain


@pytest.mark.parametrize("path", ["dense", "packed", "cache"])
def test_noise_is_uniform_within_the_bound_of_the_rows_own_length(tiny_llama: LlamaForCausalLM, path: str) -> None:
    """Against a forward of each row on embeddings plus noise drawn here, in the same order: row by row, real tokens."""
    batch: Batch = collate(ROWS)
    torch.manual_seed(4)
    got = completion_logprobs(tiny_llama, batch, path=path, neftune_alpha=7.0).logprobs
    torch.manual_seed(4)
    # the last token predicts nothing and is not embedded
    lengths = [len(row.prompt_ids) + len(row.completions[0]) for row in ROWS]
    drawn = (torch.rand(sum(lengths) - 4, 32) * 2 - 1).split([length - 1 for length in lengths])
    for n, (row, noise, length) in enumerate(zip(ROWS, drawn, lengths, strict=True)):
        ids = torch.tensor(row.prompt_ids + row.completions[0])
        embedded = tiny_llama.model.embed_tokens(ids[:-1]) + noise * 7.0 / math.sqrt(length * 32)
        logprobs = tiny_llama(inputs_embeds=embedded[None]).logits[0].log_softmax(-1)
        labels = ids[len(row.prompt_ids) :]
        wanted = logprobs[len(row.prompt_ids) - 1 :][range(len(labels)), labels]
        torch.testing.assert_close(got[n, : len(labels)], wanted, rtol=1e-5, atol=1e-6)  # of size 4
    assert not tiny_llama.model.embed_tokens._forward_hooks


def test_noise_needs_one_completion_per_prompt(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="one completion per prompt"):
        completion_logprobs(tiny_llama, collate([Example([3], [[4], [5]])]), neftune_alpha=5.0)
