"""What every algorithm shares: policy, reference, optimizer, log-probs, reductions and metrics."""

from __future__ import annotations

import functools
import random
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from alignment.algorithm.meter import Meter
from alignment.batch import Batch, Example
from alignment.errors import UserError
from alignment.losses.reduce import Moments, moments
from alignment.model.logprobs import TokenScores, completion_logprobs
from alignment.ref_strategy.base import Reference

Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine"]


def refusal(error: ValueError, **keys: str) -> UserError:
    """What a loss has against its options, under the config's keys; `keys`: those that it knows by another name."""
    text = str(error)
    for option, key in keys.items():
        text = re.sub(rf"\b{option}\b", key, text)
    option, _, rest = text.partition(" must be ")
    if rest and option.isidentifier():
        return UserError(f"algorithm.{option}: must be {rest}: type algorithm.{option}=<such a number>")
    return UserError(f"algorithm.loss: {text}")


class AlignmentModule(L.LightningModule):
    """Policy, reference and one optimizer. A subclass adds its loss, nothing else.

    Class attributes declare what the algorithm needs; validation, the planner and the docs read them without importing
    this file, so they are literals.
    """

    # What the data source must serve: "prompts", "pairs", "demonstrations", ...
    data_form: ClassVar[str] = "demonstrations"
    # Learns from its own samples: one rollout is one Lightning epoch.
    online: ClassVar[bool] = False
    # "required", "beta" (only if beta > 0) or "optional" (only to report the KL).
    reference_need: ClassVar[str] = "optional"
    # Whether completions are sampled from it, if only in evaluation.
    samples: ClassVar[bool] = True
    # Smallest group size that means anything.
    min_group: ClassVar[int] = 1

    policy: nn.Module | None
    reference: Reference
    total_steps: int
    start_step: int
    microbatch_size: int
    beta: float = 0.0

    def __init__(
        self,
        source,
        reference: Reference,
        optimizer: Callable[..., torch.optim.Optimizer],
        callbacks: Sequence[L.Callback],
        *,
        microbatch_size: int,
        lr: float,
        lr_schedule: Schedule,
        warmup_ratio: float,
    ) -> None:
        super().__init__()
        self.source, self.reference, self.optimizer, self.callbacks = source, reference, optimizer, list(callbacks)
        self.microbatch_size, self.lr, self.lr_schedule, self.warmup_ratio = (
            microbatch_size,
            lr,
            lr_schedule,
            warmup_ratio,
        )
        self.policy = None
        self.temperature = 1.0
        self.max_new_tokens = 0  # the longest completion that is sampled; the rollout's own setting
        self.total_steps = 1
        self.start_step = 0  # of a resumed run; the trainer's own counter knows it only once it fits
        self.meter = Meter()
        self.strict_loading = False  # checkpoints hold what is trained, not the frozen weights

    # ---- building -------------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        if self.policy is None:
            policy = self.policy = self.source.policy()
            self.reference.attach(self.source, policy)

    def configure_callbacks(self) -> list[L.Callback]:
        return self.callbacks

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.optimizer(self.trained_parameters(), lr=self.lr)
        warmup = round(self.warmup_ratio * self.total_steps)
        scheduler = get_scheduler(
            self.lr_schedule, optimizer, num_warmup_steps=warmup, num_training_steps=self.total_steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def trained_parameters(self) -> list[Any]:
        """Parameters, or groups of them with learning rates of their own."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def needs_reference(self) -> bool:
        """Whether the training loss reads `batch.ref_logprobs`."""
        return self.reference_need == "required" or (self.reference_need == "beta" and self.beta > 0)

    # ---- log-probs: one function for policy, old and reference passes -----------------------------------------
    def logprobs(self, batch: Batch, **options: Any) -> TokenScores:
        """log p(completion tokens) under the policy, float32 (N, C)."""
        return self._score(self.policy, batch, **options)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor | None:
        """The same under the reference, detached; None where the reference cannot know them."""
        assert self.policy is not None
        return self.reference.logprobs(self.policy, batch, self.score)

    def reference_examples(self, data: Any) -> list[Example]:
        """Every example of a fixed dataset whose reference log-probs are read: what can be computed in advance."""
        return [*data.train, *data.heldout]

    @torch.no_grad()
    def score(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probs (N, C) of a batch under any model, by the very code that scores the policy."""
        return self._score(model, batch).logprobs

    def _score(self, model: nn.Module | None, batch: Batch, **options: Any) -> TokenScores:
        assert model is not None, "configure_model() comes first"
        with self.trainer.precision_plugin.forward_context():
            return completion_logprobs(
                model,
                batch,
                temperature=self.temperature,
                path=self.source.shared_prompt,
                chunk_tokens=self.source.head_chunk_tokens,
                **options,
            )

    # ---- reductions: means over the whole optimizer step, whatever its microbatches and ranks ---------------------
    def token_mean(self, values: Tensor, batch: Batch) -> Tensor:
        """Mean of (N, C) values over every loss token of this optimizer step."""
        return self.step_mean(torch.where(batch.loss_mask, values, 0.0).sum(), batch.step_tokens)

    def example_mean(self, values: Tensor, batch: Batch) -> Tensor:
        """Mean of per-example values over every example of this optimizer step."""
        return self.step_mean(values.sum(), batch.step_examples)

    def step_mean(self, total: Tensor, count: float) -> Tensor:
        """This microbatch's share of a mean over `count` items of the whole optimizer step."""
        return total * self._step_scale() / max(count, 1.0)

    def _step_scale(self) -> int:
        """Lightning divides by the accumulation and DDP by the ranks: undo both, step counts are already global."""
        if not self.trainer.training:
            return 1
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    # ---- metrics --------------------------------------------------------------------------------------------------
    @property
    def step(self) -> int:
        """Optimizer steps done, also in an evaluation before the resumed fit."""
        return max(self.global_step, self.start_step)

    @property
    def phase(self) -> str:
        return "train" if self.trainer.training else "val"

    def log_loss(self, loss: Tensor, batch: Batch, count: float) -> None:
        """In training the step's loss is the sum of its microbatches' shares; in evaluation a mean over `count`."""
        if not self.trainer.training:
            self.meter.add("val/loss", float(loss.detach()) * count, count)
            return
        share = 1.0 / (self.trainer.accumulate_grad_batches * self.trainer.world_size)
        self.meter.add("train/loss", float(loss.detach()) * share, share)
        self.meter.total("train/tokens", float(batch.prompt_mask.sum() + batch.completion_mask.sum()))

    def log_stats(self, stats: dict[str, Tensor], mask: Tensor | None = None) -> None:
        """Detached values of a loss, as means over all of them or over those under `mask`."""
        for name, values in stats.items():
            self.meter.mean(f"{self.phase}/{name}", values, mask)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        if norm != norm or norm == float("inf"):
            raise UserError(
                f"the gradient of step {self.global_step + 1} is not finite ({norm}). Lower algorithm.lr, or find the "
                "rows in samples.jsonl; the last checkpoint is from before this step"
            )
        self.meter.add("train/grad_norm", norm, 1)
        self.meter.add("train/lr", optimizer.param_groups[0]["lr"], 1)

    def log_step(self) -> None:
        """A row of everything measured since the last one."""
        self._log(self.meter.flush(self._sum_over_ranks))

    def on_validation_start(self) -> None:
        self._set_aside = self.meter
        self.meter = Meter()

    def on_validation_epoch_end(self) -> None:
        metrics = self.meter.flush(self._sum_over_ranks)
        self._log({name: value for name, value in metrics.items() if name.startswith("val/")})
        self.meter = self._set_aside

    def _log(self, metrics: dict[str, float]) -> None:
        """One row for every logger, at the optimizer's step; callbacks (early stopping, the bar) see the same numbers.

        Not through Lightning's own logging: it repeats old values for the rest of an epoch, and counts steps from 0.
        """
        self.log_dict(metrics, logger=False, batch_size=1)
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=metrics, step=self.step)

    def _sum_over_ranks(self, table: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(table.to(self.device), reduce_op="sum").cpu()

    # ---- evaluation -----------------------------------------------------------------------------------------------
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch.texts:
            self._evaluate_samples(batch)
        elif batch.group_size:
            self.training_step(batch, batch_idx)

    def _evaluate_samples(self, batch: Batch) -> None:
        """pass@1 (and pass@k), mean reward, length and KL to the reference, of samples of held-out prompts."""
        meter = self.meter
        assert batch.rewards is not None
        assert batch.finished is not None
        meter.mean("val/reward", batch.rewards)
        for name, values in batch.parts.items():
            meter.mean(f"val/{name}", values)
            if batch.group_size > 1:
                groups = values.view(-1, batch.group_size)
                passed = torch.where(groups.isnan().all(1), torch.nan, (groups == 1).any(1).float())
                meter.mean(f"val/{name}_pass@{batch.group_size}", passed)
        meter.mean("val/length", batch.completion_mask.sum(-1).float())
        meter.mean("val/finished", batch.finished.float())
        if batch.ref_logprobs is not None:
            gap = self.logprobs(batch).logprobs - batch.ref_logprobs
            meter.mean("val/kl", gap.sum(-1))

    # ---- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What is trained, and a reference that moves. Frozen weights are in the model's own folder already."""
        kept = self.reference.checkpointed
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad or kept(name)}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's file has no random states; dropout and the like need them to go on exactly."""
        version, internal, gauss = random.getstate()
        checkpoint["random"] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
        if torch.cuda.is_available():
            checkpoint["random"]["cuda"] = torch.cuda.get_rng_state_all()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._random = checkpoint["random"]

    def on_train_start(self) -> None:
        state = self.__dict__.pop("_random", None)
        if state is None:
            return
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


class OfflineModule(AlignmentModule):
    """An algorithm that learns from a fixed dataset."""

    def __init__(
        self,
        source,
        reference: Reference,
        optimizer: Callable[..., torch.optim.Optimizer],
        callbacks: Sequence[L.Callback],
        *,
        batch_size: int,
        num_epochs: float,
        max_steps: int | None,
        length_window: int = 1,
        **common: Any,
    ) -> None:
        super().__init__(source, reference, optimizer, callbacks, **common)
        self.batch_size, self.num_epochs, self.max_steps = batch_size, num_epochs, max_steps
        self.length_window = length_window

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A finished run can be given more steps: to Lightning its one epoch was over with its last batch."""
        super().on_load_checkpoint(checkpoint)
        if "loops" in checkpoint:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            progress["is_last_batch"] = checkpoint["global_step"] >= self.total_steps


class OnlineModule(AlignmentModule):
    """An algorithm that learns from its own samples."""

    data_form: ClassVar[str] = "prompts"
    online: ClassVar[bool] = True
    # Compares its samples with the prompt's greedy completion (`batch.greedy_rewards`).
    greedy_baseline: ClassVar[bool] = False
    # The last completion of each prompt is sampled from the reference (`batch.from_reference`), or from its mixture
    # with the policy by `mixture_coef`: 1 = the reference alone, 0 = the policy alone.
    reference_sample: ClassVar[bool] = False
    # Completions of each prompt that are learned from: a number, or the name of the key that holds it.
    rows_per_prompt: ClassVar[int | str] = "group_size"

    mixture_coef: float = 1.0
    reward_weights: dict[str, float]
    # Times that prompts may be drawn for one rollout, to replace groups that say nothing.
    max_draws: int = 1

    def __init__(
        self,
        source,
        reference: Reference,
        optimizer: Callable[..., torch.optim.Optimizer],
        callbacks: Sequence[L.Callback],
        *,
        num_rollouts: int,
        num_prompts: int,
        group_size: int,
        num_iterations: int,
        num_minibatches: int,
        **common: Any,
    ) -> None:
        super().__init__(source, reference, optimizer, callbacks, **common)
        self.num_rollouts, self.num_prompts, self.group_size = num_rollouts, num_prompts, group_size
        self.num_iterations, self.num_minibatches = num_iterations, num_minibatches

    @property
    def num_learned(self) -> int:
        """Completions of one prompt that are learned from."""
        rows = self.rows_per_prompt
        return rows if isinstance(rows, int) else getattr(self, rows)

    @property
    def steps_per_rollout(self) -> int:
        return self.num_iterations * self.num_minibatches

    @abstractmethod
    def advantages(self, rollout: Batch) -> Tensor:
        """(N,) float32, 0 where a completion is unscorable."""

    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        """A scored rollout as the microbatches of one pass over it, with all that their loss will read but the
        reference's log-probs, which are filled in when a microbatch is first learned from."""
        rollout.advantages = self.advantages(rollout)
        microbatches = rollout.split(self.microbatch_size)
        for batch in microbatches:
            batch.to(self.device)
            self.set_old_logprobs(batch)
        return microbatches

    def global_moments(self, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Moments of what all ranks hold, where `mask` (default: where not NaN). Every rank must call it."""
        mine = moments(values.double().cpu(), None if mask is None else mask.cpu())
        table = torch.zeros(self.trainer.world_size, 3, dtype=torch.float64)
        table[self.trainer.global_rank] = torch.stack(list(mine))
        merged = functools.reduce(Moments.merge, (Moments(*row) for row in self._sum_over_ranks(table)))
        return Moments(*(number.to(values.device, values.dtype) for number in merged))

    def of_every_rank(self, value: Any) -> list[Any]:
        """What each rank holds, in their order. Every rank must call it."""
        values = [value] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def set_old_logprobs(self, batch: Batch) -> None:
        """Old log-probs, from the very pass that training will make, so that the first ratio is exactly 1.

        With one optimizer step per rollout they equal the current ones, and `old_logprobs` stays None: the loss then
        takes its own detached values and no second pass is paid.
        """
        if self.steps_per_rollout > 1:
            batch.old_logprobs = self.logprobs(batch).logprobs
