"""GKD's step against full logits of both models; on-policy steps; what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from alignment.algorithm.gkd import GKD, check_same_tokens
from alignment.batch import Example, collate
from alignment.callbacks.rollout import to_batch
from alignment.callbacks.student_samples import StudentSamples, coin
from alignment.data.datamodule import StepStream
from alignment.errors import UserError
from alignment.ref_strategy.none import NoReference
from alignment.rollout.hf import Completions

COMMON: dict[str, Any] = {
    "batch_size": 4,
    "num_epochs": 1,
    "max_steps": None,
    "microbatch_size": 4,
    "lr": 1e-3,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
}
ROWS = [
    Example([5, 6, 7], [[8, 9, 10, 2]]),
    Example([11], [[12, 2]]),
    Example([13, 14, 15, 16, 17], [[18, 19, 20, 21, 22, 2]], [[False] * 4 + [True] * 2]),
    Example([23, 24], [[25]]),
]
VOCABULARY = {f"<{n}>": n for n in range(64)}


def source() -> SimpleNamespace:
    tokenizer = SimpleNamespace(get_vocab=lambda: dict(VOCABULARY))
    return SimpleNamespace(check=lambda: None, shared_prompt="auto", head_chunk_tokens=8, tokenizer=tokenizer)


def module(
    student: nn.Module, teacher: nn.Module, *, training: bool = True, accumulate: int = 1, **options: Any
) -> GKD:
    settings = COMMON | {"beta": 0.5, "temperature": 1.0, "lmbda": 0.0} | options
    made = GKD(source(), NoReference(), functools.partial(torch.optim.SGD), [], teacher=source(), **settings)
    made.policy, made.teacher.model = student, teacher.requires_grad_(False).eval()
    trainer = SimpleNamespace(
        training=training,
        accumulate_grad_batches=accumulate,
        world_size=1,
        precision_plugin=SimpleNamespace(forward_context=contextlib.nullcontext),
    )
    made.__dict__["kept_trainer"] = trainer  # Lightning itself keeps a weak reference only
    made.trainer = trainer  # type: ignore[assignment]
    return made


@pytest.fixture
def teacher(tiny_llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """Other weights, and a head padded by six rows that are no tokens."""
    torch.manual_seed(5)
    config = copy.deepcopy(tiny_llama.config)
    config.vocab_size = 70
    return LlamaForCausalLM(config).float()


def probabilities(model: nn.Module, row: Example, temperature: float) -> Tensor:
    """(tokens that count, 64), from a forward of the row alone."""
    ids = torch.tensor([row.prompt_ids + row.completions[0]])
    keep = torch.tensor(row.loss_masks[0] if row.loss_masks else [True] * len(row.completions[0]))
    logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1, :64][keep]
    return (logits / temperature).softmax(-1)


def expected(student: nn.Module, teacher: nn.Module, beta: float, temperature: float = 1.0) -> Tensor:
    """2306.13649: beta KL(teacher || M) + (1 - beta) KL(student || M), the ends by convention; over 9 tokens."""
    p, q = (torch.cat([probabilities(m, row, temperature) for row in ROWS]) for m in (student, teacher))
    q = q.detach()
    if beta == 0:
        return (q * (q / p).log()).sum() / 9
    if beta == 1:
        return (p * (p / q).log()).sum() / 9
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum() / 9


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradient_are_those_of_full_logits(
    tiny_llama: LlamaForCausalLM, teacher: LlamaForCausalLM, beta: float, temperature: float
) -> None:
    wanted = expected(tiny_llama, teacher, beta, temperature)
    gkd = module(tiny_llama, teacher, beta=beta, temperature=temperature)
    loss = gkd.training_step(collate(ROWS), 0)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)  # differences of logarithms near each other
    for ours, theirs in zip(gradients(tiny_llama, loss), gradients(tiny_llama, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    metrics = gkd.meter.flush()
    p, q = (torch.cat([probabilities(m, row, temperature) for row in ROWS]).detach() for m in (tiny_llama, teacher))
    assert metrics["train/student_entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-5)
    assert metrics["train/teacher_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert metrics["train/on_policy"] == 0
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_equal_to_the_student_teaches_nothing(tiny_llama: LlamaForCausalLM, beta: float) -> None:
    loss = module(tiny_llama, copy.deepcopy(tiny_llama), beta=beta).training_step(collate(ROWS), 0)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in gradients(tiny_llama, loss))


@pytest.mark.parametrize("size", [2, 1])
def test_the_cut_into_microbatches_changes_nothing(
    tiny_llama: LlamaForCausalLM, teacher: LlamaForCausalLM, size: int
) -> None:
    whole = module(tiny_llama, teacher).training_step(collate(ROWS), 0)
    gkd, total = module(tiny_llama, teacher, accumulate=4 // size), torch.zeros(())
    for first in range(0, 4, size):
        batch = collate(ROWS[first : first + size])
        batch.step_tokens = 9.0
        total = total + gkd.training_step(batch, first) / (4 // size)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(gradients(tiny_llama, total), gradients(tiny_llama, whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_a_batch_without_tokens_that_count(tiny_llama: LlamaForCausalLM, teacher: LlamaForCausalLM) -> None:
    batch = collate([Example([3, 4], [[5, 6]], [[False, False]])])
    loss = module(tiny_llama, teacher).training_step(batch, 0)
    assert float(loss.detach()) == 0
    loss.backward()  # a rank without tokens still takes part


class Rollout:
    """Completes a prompt with as many copies of its first token as the prompt is long."""

    seed = 3

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def complete(self, trainer: Any, module: Any, examples: list[Example], group_size: int, *, seed: int) -> Any:
        self.calls.append((len(examples), seed))
        ids = [example.prompt_ids[:1] * len(example.prompt_ids) for example in examples]
        made = Completions(ids, [[-1.0] * len(row) for row in ids], [True] * len(ids))
        return to_batch(examples, made, group_size)


def test_an_on_policy_step_learns_from_samples_of_its_own_prompts_and_counts_their_tokens() -> None:
    """The step's tokens are known to each of its microbatches before the first backward."""
    steps = StepStream(ROWS, batch_size=4, microbatch_size=2, total_steps=6, rank=0, world_size=1, seed=0)
    rollout = Rollout()
    callback = StudentSamples(rollout)  # type: ignore[arg-type]
    trainer = SimpleNamespace(
        accumulate_grad_batches=2,
        datamodule=SimpleNamespace(steps=steps),
        strategy=SimpleNamespace(reduce=lambda table, reduce_op: table, root_device="cpu"),
    )
    tossed = [coin(3, step) < 0.5 for step in range(6)]
    assert len(set(tossed)) == 2  # both kinds of step
    for step, on_policy in enumerate(tossed):
        trainer.global_step = step
        for microbatch in range(2):
            index = 2 * step + microbatch
            batch, before = steps[index], steps[index]
            gkd = SimpleNamespace(on_policy_share=0.5, device="cpu", meter=SimpleNamespace(mean=lambda *_: None))
            callback.on_train_batch_start(trainer, gkd, batch, index)
            assert [row.prompt_ids for row in batch.examples] == [row.prompt_ids for row in before.examples]
            if on_policy:
                lengths = [len(row.prompt_ids) for row in batch.examples]
                assert batch.completion_mask.sum(1).tolist() == lengths
                assert batch.step_tokens == 3 + 1 + 5 + 2  # each prompt's length
                assert batch.step_examples == 4
            else:
                assert torch.equal(batch.completion_ids, before.completion_ids)
                assert batch.sampler_logprobs is None
    assert rollout.calls == [(4, step) for step, on_policy in enumerate(tossed) if on_policy]


def test_the_coin_is_fair_and_a_function_of_seed_and_step() -> None:
    tosses = [coin(0, step) for step in range(2000)]
    assert tosses == [coin(0, step) for step in range(2000)]
    assert tosses != [coin(1, step) for step in range(2000)]
    # four standard errors of a share of 2000 tosses: 4 * sqrt(.3 * .7 / 2000) = 0.041
    assert sum(toss < 0.3 for toss in tosses) / 2000 == pytest.approx(0.3, abs=0.041)
    assert all(0 <= toss < 1 for toss in tosses)


def test_a_teacher_with_other_tokens_is_refused() -> None:
    check_same_tokens({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2})  # more tokens do no harm
    with pytest.raises(UserError, match=r"1 of the student's 2 tokens .*id 1 is 'b' for the student, 'c' for the teac"):
        check_same_tokens({"a": 0, "b": 1}, {"a": 0, "c": 1})
    with pytest.raises(UserError, match="None for the teacher"):
        check_same_tokens({"a": 0, "b": 1}, {"a": 0})
