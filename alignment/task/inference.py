"""A trained model that samples and is measured, for the tasks that learn nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from alignment.batch import Batch, Example
from alignment.callbacks.rollout import rank_seed, to_batch
from alignment.config import build, external_problems
from alignment.data.prepare import prepare
from alignment.errors import UserError
from alignment.model.hf import AUTOCAST
from alignment.model.logprobs import completion_logprobs
from alignment.reward.combine import RewardSet
from alignment.strategy.precision import pick_precision
from alignment.task.assemble import part_problems

log = logging.getLogger("alignment")
WHOLE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class Inference:
    """The model that a config starts from, without gradients, on one device, in the number format of a training run.

    source: `model` of the config, or another one, such as what it is compared with.
    """

    def __init__(self, cfg: dict[str, Any], source: Any = None) -> None:
        transformers.utils.logging.disable_progress_bar()
        trainer, self.seed = cfg["trainer"], cfg["seed"]
        self.source = source or build(cfg["model"])
        precision, reason = pick_precision(
            trainer["precision"], accelerator=trainer["accelerator"], tiny=self.source.tiny
        )
        log.info("precision %s: %s", precision, reason)
        self.source.compact_for(precision)
        build(cfg["strategy"]).prepare(self.source)
        on_gpu = trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.autocast = getattr(torch, AUTOCAST[precision]) if precision in AUTOCAST else None
        torch.manual_seed(self.seed)
        self.model: nn.Module = self.source.frozen().to(device=self.device, dtype=WHOLE.get(precision))
        self.engine = build(cfg["rollout"])
        self.engine.sync(self.model, self.autocast)

    def context(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    @torch.no_grad()
    def complete(
        self, examples: Sequence[Example], num_samples: int, *, number: int, temperature: float | None = None
    ) -> Batch:
        """`num_samples` completions of each prompt, with their texts. number: of this draw; the seed depends on it."""
        with self.context():
            completions = self.engine.generate(
                self.model,
                [example.prompt_ids for example in examples],
                group_size=num_samples,
                stop_ids=self.source.stop_ids,
                pad_id=self.source.tokenizer.pad_token_id,
                seed=rank_seed(self.seed, number, 0),
                temperature=temperature,
            )
        batch = to_batch(examples, completions, num_samples)
        batch.texts = self.source.tokenizer.batch_decode(completions.ids, skip_special_tokens=True)
        return batch

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """log p of the completion tokens, float32 (N, C) on the CPU."""
        options = {"path": self.source.shared_prompt, "chunk_tokens": self.source.head_chunk_tokens}
        with self.context():
            scores = completion_logprobs(self.model, batch.to(self.device), temperature=temperature, **options)
        return scores.logprobs.cpu()


def build_rewards(cfg: dict[str, Any]) -> RewardSet:
    return RewardSet({name: (reward := build(node), reward.weight) for name, node in cfg["reward"].items()})


def prompts(cfg: dict[str, Any], source: Any, split: str, num_prompts: int | None) -> Sequence[Example]:
    """The first prompts of the training rows or of the held-out ones. UserError where there are none."""
    prepared = prepare(
        build(cfg["data"]),
        "prompts",
        source,
        num_prompts=num_prompts if split == "heldout" and num_prompts else 1 << 62,
        with_heldout=False,
        encoding=cfg["encoding"],
        cleaning=cfg["cleaning"],
    )
    examples = (prepared.train if split == "train" else prepared.heldout_prompts)[:num_prompts]
    if not len(examples):
        what = "nothing is held out: type task.split=train, or data.heldout=0.1"
        raise UserError(
            f"task.split: {what if split == 'heldout' else 'the data have no training rows: see data.path'}"
        )
    return examples


def inference_problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said against a task that samples, before the model loads."""
    found = external_problems(cfg) or part_problems(cfg)[0]
    if cfg["trainer"]["devices"] * cfg["trainer"]["num_nodes"] > 1:
        found.append("trainer.devices: this task uses one device: type trainer.devices=1 trainer.num_nodes=1")
    return found
