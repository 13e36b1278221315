"""An offline algorithm around the tiny Llama, without run.py: for the values of one training_step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaForCausalLM

from alignment.batch import Batch, Example, collate
from alignment.callbacks.rollout import count_step_tokens
from alignment.ref_strategy.base import Reference

OFFLINE = {"batch_size": 4, "microbatch_size": 4, "num_epochs": 1, "max_steps": 2}
COMMON = {"lr": 1e-3, "lr_schedule": "constant", "warmup_ratio": 0.0}


class Given(Reference):
    """A reference that is another model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def logprobs(self, policy: Any, batch: Batch, score: Any) -> Tensor:
        return score(self.model, batch)


@pytest.fixture
def offline(tiny_llama: LlamaForCausalLM) -> Callable[..., Any]:
    """offline(Class, **options) -> the module in training, policy = tiny_llama, reference = weights a little away."""

    def build(algorithm: type, **options: Any) -> Any:
        other = copy.deepcopy(tiny_llama).eval().requires_grad_(False)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        source = SimpleNamespace(shared_prompt="dense", head_chunk_tokens=1024)
        optimizer = functools.partial(torch.optim.AdamW)
        module = algorithm(source, Given(other), optimizer, [], **(OFFLINE | COMMON | options))
        module.policy = tiny_llama
        module.trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        module.trainer.training = True
        return module

    return build


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    """batch_of([[completion lengths] per prompt]) -> a batch of random tokens, prompts of 2, 3, 4, ... tokens."""

    def make(lengths: list[list[int]]) -> Batch:
        rng = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            return torch.randint(3, 64, (count,), generator=rng).tolist()

        return collate([Example(tokens(2 + i), [tokens(n) for n in row]) for i, row in enumerate(lengths)])

    return make


@pytest.fixture
def sums() -> Callable[[torch.nn.Module, Batch], Tensor]:
    """Summed log-prob of each completion under a model, token by token, one row at a time: the naive loop."""

    def loop(model: torch.nn.Module, batch: Batch) -> Tensor:
        totals = []
        for n, ids in enumerate(batch.completion_ids):
            prompt = batch.prompt_ids[n // batch.group_size][batch.prompt_mask[n // batch.group_size]].tolist()
            completion = ids[batch.completion_mask[n]].tolist()
            logits = model(torch.tensor([prompt + completion])).logits[0]
            total = torch.zeros(())
            for t, token in enumerate(completion):
                total = total + logits[len(prompt) + t - 1].log_softmax(-1)[token]
            totals.append(total)
        return torch.stack(totals)

    return loop


# ---- algorithms that learn from their own samples --------------------------------------------------------------------
ONLINE = {"num_rollouts": 1, "num_prompts": 2, "num_iterations": 1, "num_minibatches": 1}


@pytest.fixture
def online(tiny_llama: LlamaForCausalLM) -> Callable[..., Any]:
    """online(Class, **options) -> the module in training, policy = tiny_llama, reference = weights a little away.

    Options of base/online.yaml that are not given are those of ONLINE and COMMON; the others a test names.
    """
    other = copy.deepcopy(tiny_llama).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn_like(parameter)

    def build(algorithm: type, *, max_new_tokens: int = 8, **options: Any) -> Any:
        source = SimpleNamespace(shared_prompt="dense", head_chunk_tokens=1024)
        settings = ONLINE | COMMON | options
        module = algorithm(source, Given(other), functools.partial(torch.optim.AdamW), [], **settings)
        module.policy, module.max_new_tokens = tiny_llama, max_new_tokens
        module.trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        module.trainer.training = True
        return module

    return build


@pytest.fixture
def keys_of() -> Callable[[str], dict[str, Any]]:
    """The keys of an option's yaml and of those it extends, but for those of every online algorithm."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "algorithm"

    def read(name: str) -> dict[str, Any]:
        node = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        keys: dict[str, Any] = {}
        for base in node.pop("defaults", []):
            keys |= {} if base in ("_self_", "base/online") else read(base)
        return keys | {key: value for key, value in node.items() if key != "_target_"}

    return read


@pytest.fixture
def rollout_of() -> Callable[..., Batch]:
    """rollout_of([[completion lengths] per prompt], rewards, finished=...) -> a scored rollout of random tokens."""

    def make(lengths: list[list[int]], rewards: list[float], finished: list[bool] | None = None) -> Batch:
        rng = torch.Generator().manual_seed(1)

        def draw(count: int) -> list[int]:
            return torch.randint(3, 64, (count,), generator=rng).tolist()

        batch = collate([Example(draw(2 + i), [draw(n) for n in row]) for i, row in enumerate(lengths)])
        batch.rewards = torch.tensor(rewards)
        batch.finished = torch.tensor(finished if finished is not None else [True] * len(rewards))
        batch.sampler_logprobs = torch.zeros(batch.completion_ids.shape)
        batch.texts = ["" for _ in rewards]
        return batch

    return make


@pytest.fixture
def learn() -> Callable[..., tuple[float, Tensor, dict[str, float]]]:
    """learn(module, microbatches, first=0, count=all) -> loss, flat gradient and metrics of one optimizer step."""

    def step(module: Any, microbatches: list[Batch], *, first: int = 0, count: int | None = None):
        window = len(microbatches) if count is None else count
        module.trainer.accumulate_grad_batches = window
        count_step_tokens(module.trainer, microbatches)
        module.zero_grad()
        for batch in microbatches[first : first + window]:
            if module.needs_reference and batch.ref_logprobs is None:
                batch.ref_logprobs = module.reference_logprobs(batch)
            (module.training_step(batch, 0) / window).backward()
        metrics = module.meter.flush()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        return metrics["train/loss"], gradient, metrics

    return step


@pytest.fixture
def tokens() -> Callable[[torch.nn.Module, Batch], list[list[float]]]:
    """Log-prob of every completion token under a model, one row and one token at a time."""

    @torch.no_grad()
    def loop(model: torch.nn.Module, batch: Batch) -> list[list[float]]:
        rows = []
        for n, ids in enumerate(batch.completion_ids):
            where = n // batch.group_size
            prompt = batch.prompt_ids[where][batch.prompt_mask[where]].tolist()
            completion = ids[batch.completion_mask[n]].tolist()
            logits = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            rows.append([float(logits[len(prompt) + t - 1, token]) for t, token in enumerate(completion)])
        return rows

    return loop
