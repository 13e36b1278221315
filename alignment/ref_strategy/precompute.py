"""Reference log-probs of a fixed dataset, computed once and kept on disk for every later run."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alignment.batch import Batch, Example, collate
from alignment.model.adapters import adapter_off
from alignment.ref_strategy.base import Reference, Score
from alignment.ref_strategy.store import LogprobStore, example_key, fingerprint

log = logging.getLogger("alignment")


class Precompute(Reference):
    """One pass over the dataset before training; no reference model is held while training.

    Values are stored under a key of everything that changes them (weights, number format, attention code, torch) and by
    example (its tokens), so another order, subset, beta, loss, seed, a resumed or a several-process run all find them.
    """

    offline_only = True

    def __init__(self, *, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._values: dict[bytes, Tensor] = {}
        self._source: Any = None

    def attach(self, source: Any, policy: nn.Module) -> None:
        self._source = source

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The starting point: the policy without its fresh adapter, else a copy that lives for this pass only."""
        if self._adapter_is_fresh:
            with adapter_off(policy):
                yield policy
        else:
            yield self._source.frozen().to(next(policy.parameters()).device)

    @property
    def _adapter_is_fresh(self) -> bool:
        return self._source.adapter == "lora" and self._source.adapter_path is None

    def logprobs(self, policy: nn.Module, batch: Batch, score: Score) -> Tensor | None:
        if not batch.texts:
            return self._lookup(batch)
        if not self._adapter_is_fresh:
            return None  # samples are not in the dataset, and there is no model to ask
        return super().logprobs(policy, batch, score)

    def _lookup(self, batch: Batch) -> Tensor:
        values = torch.zeros(batch.completion_mask.shape, dtype=torch.float32)
        mask = batch.completion_mask.cpu()
        values[mask] = torch.cat([self._values[example_key(example)] for example in batch.examples])
        return values.to(batch.completion_mask.device)

    def prepare(self, module: Any, data: Any) -> None:
        """Read what is stored, compute the rest; several jobs that start together wait for the first."""
        examples = {example_key(example): example for example in module.reference_examples(data)}
        if examples.keys() <= self._values.keys():
            return
        started, strategy = time.perf_counter(), module.trainer.strategy
        rank, world_size = module.trainer.global_rank, module.trainer.world_size
        with self.scoring_model(module.policy) as model:
            store = LogprobStore(self.folder, self._key(model, module.trainer.precision))
            with store.lock() if rank == 0 else contextlib.nullcontext():
                strategy.barrier()
                self._values = store.read(examples.keys())
                missing = [example for key, example in examples.items() if key not in self._values]
                computed = self._compute(module, model, missing[rank::world_size])
                store.write(computed)
                self._values |= _gathered(computed, world_size)
                strategy.barrier()
        seconds, reused = time.perf_counter() - started, len(examples) - len(missing)
        self.report = {
            "reference/reused": reused,
            "reference/computed": len(missing),
            "reference/seconds": seconds,
        }
        log.info(
            "reference cache: %d of %d examples reused, %d computed in %.1f s (%s)",
            reused,
            len(examples),
            len(missing),
            seconds,
            store.folder,
        )

    def _key(self, model: nn.Module, precision: str) -> dict[str, Any]:
        return {
            "weights": fingerprint(model),
            "precision": str(precision),
            "attention": self._source.attn_implementation,
            "shared_prompt": self._source.shared_prompt,
            "torch": torch.__version__,
        }

    def _compute(self, module: Any, model: nn.Module, examples: Sequence[Example]) -> dict[bytes, Tensor]:
        """Score in microbatches of like length; training's own batches are shuffled, these need not be."""
        ordered = sorted(examples, key=lambda e: len(e.prompt_ids) + sum(map(len, e.completions)), reverse=True)
        values: dict[bytes, Tensor] = {}
        for start in range(0, len(ordered), module.microbatch_size):
            part = ordered[start : start + module.microbatch_size]
            batch = collate(part).to(module.device)
            scored = module.score(model, batch)
            flat = scored[batch.completion_mask].cpu()
            lengths = [sum(map(len, example.completions)) for example in part]
            values |= dict(zip(map(example_key, part), flat.split(lengths), strict=True))
        return values


def _gathered(computed: dict[bytes, Tensor], world_size: int) -> dict[bytes, Tensor]:
    """What all ranks computed together."""
    if world_size == 1:
        return computed
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, computed)
    return {key: value for part in parts for key, value in part.items()}
