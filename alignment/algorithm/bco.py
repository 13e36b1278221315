"""Binary Classifier Optimization: a classifier of desirable and undesirable answers around a moving shift."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.algorithm.unpaired import UnpairedModule, labels
from alignment.batch import Batch, Example, collate
from alignment.errors import UserError
from alignment.losses.bco import SHIFTS, ClassMoments, bco, fit_prompt_classifier, udm_weights
from alignment.losses.reduce import Moments
from alignment.model.embeddings import prompt_embeddings
from alignment.ref_strategy.store import example_key

log = logging.getLogger("alignment")

# Prompts of each class that the classifier is fitted on (TRL 1.0).
MAX_FITTED = 1024


class BCO(UnpairedModule):
    """BCO (2404.04656), with its prompt weights (UDM) where `density_ratio` is given.

    shift: of the rewards of all earlier optimizer steps, over all ranks. The usual code also counts the microbatch at
    hand; without it, loss and gradient do not depend on how a step is cut. In the first step it is 0, which the rewards
    are then too.

    density_ratio: [smallest, largest] weight of an undesirable row; None = all weigh 1. A logistic regression on
    embeddings of the prompts, the reference's mean last hidden states before training, says how likely a prompt is to
    come with a desirable answer.
    """

    def __init__(
        self,
        *passed: Any,
        beta: float,
        shift: Literal["midpoint", "running_mean"],
        density_ratio: list[float] | None,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.density_ratio = beta, density_ratio
        self.shift_of = SHIFTS[shift]
        if density_ratio is not None and not (len(density_ratio) == 2 and 0 <= density_ratio[0] <= density_ratio[1]):
            raise UserError(
                f"algorithm.density_ratio: {density_ratio} is no [smallest, largest] weight of at least 0: type "
                "algorithm.density_ratio=[0.5,10]"
            )
        self.moments = ClassMoments.start(torch.zeros((), dtype=torch.float64))
        self._seen: list[tuple[Tensor, Tensor]] = []  # rewards and labels of this step's microbatches so far
        # Prompt -> P(desirable), of a run with prompt weights.
        self.prompt_probs: dict[str, float] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        policy, reference, desirable = self.sums(batch)
        shift = self.shift_of(self.moments).to(policy.device, policy.dtype)
        weights = None if self.density_ratio is None else self._weights(batch, desirable)
        values, stats = bco(policy, reference, desirable, shift=shift, beta=self.beta, weights=weights)
        if self.trainer.training:
            self._seen.append((self.beta * (policy - reference).detach(), desirable))
        return self.unpaired_mean(values, stats, desirable, batch)

    # ---- shift ----------------------------------------------------------------------------------------------------
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After the step's last backward, before checkpoints are written."""
        super().on_before_optimizer_step(optimizer)
        rewards, desirable = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        self._seen.clear()
        rewards, desirable = (self._of_all_ranks(values) for values in (rewards, desirable))
        self.moments = self.moments.update(rewards.double(), desirable)

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        gathered = self.all_gather(values)
        assert isinstance(gathered, Tensor)
        return gathered.flatten().cpu()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        moments = [[float(number) for number in of_class] for of_class in self.moments]
        checkpoint["bco"] = {"moments": moments, "prompt_probs": self.prompt_probs}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        rows = torch.tensor(checkpoint["bco"]["moments"], dtype=torch.float64)
        self.moments = ClassMoments(*(Moments(*row.unbind()) for row in rows))
        self.prompt_probs = checkpoint["bco"]["prompt_probs"]

    # ---- prompt weights -------------------------------------------------------------------------------------------
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._prepare_weights()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._prepare_weights()

    def _weights(self, batch: Batch, desirable: Tensor) -> Tensor:
        assert self.density_ratio is not None
        probs = torch.tensor([self.prompt_probs[_prompt(e)] for e in batch.examples], device=desirable.device)
        self.log_stats({"udm_accuracy": ((probs > 0.5) == desirable).float()})
        low, high = self.density_ratio
        return udm_weights(probs, desirable, min_density_ratio=low, max_density_ratio=high)

    def _prepare_weights(self) -> None:
        """Fit the classifier before the first step; a resumed run has what it says of each prompt in its checkpoint."""
        if self.density_ratio is None or self.prompt_probs:
            return
        data = self.data
        fitted = [row for wanted in (True, False) for row in _spread_out(data.train, wanted, MAX_FITTED)]
        found = self._embed(fitted)
        try:
            embeddings = torch.stack([found[_prompt(example)] for example in fitted])
            classifier = fit_prompt_classifier(embeddings, torch.tensor(labels(fitted)))
        except ValueError as error:
            raise UserError(f"algorithm.density_ratio: {error}: type algorithm.density_ratio=null") from error
        probs = self._embed([*data.train, *data.heldout], classifier)
        self.prompt_probs = {key: float(value) for key, value in probs.items()}
        log.info(
            "prompt weights: fitted on %d rows; it tells the class of %.1f%% of the training rows (one class: %.1f%%)",
            len(fitted),
            *self._told_right(data.train),
        )

    def _told_right(self, examples: Sequence[Example]) -> tuple[float, float]:
        """Percent of rows that the classifier tells right, and that the more frequent class alone would."""
        known = labels(examples)
        right = sum((self.prompt_probs[_prompt(e)] > 0.5) == label for e, label in zip(examples, known, strict=True))
        return 100 * right / len(known), 100 * max(sum(known), len(known) - sum(known)) / len(known)

    @torch.no_grad()
    def _embed(
        self, examples: Sequence[Example], read: Callable[[Tensor], Tensor] = lambda rows: rows
    ) -> dict[str, Tensor]:
        """`read` of the embedding (H,) float64 of every different prompt. Ranks embed equally many; all get all."""
        prompts = {_prompt(example): Example(example.prompt_ids) for example in examples}
        keys, world_size = list(prompts), self.trainer.world_size
        assert self.policy is not None
        share = -(-len(keys) // world_size)
        mine = [keys[i % len(keys)] for i in range(self.trainer.global_rank, share * world_size, world_size)]
        mine.sort(key=lambda key: len(prompts[key].prompt_ids), reverse=True)
        found: dict[str, Tensor] = {}
        with self.reference.scoring_model(self.policy) as model, _without_dropout(model):
            for start in range(0, len(mine), self.microbatch_size):
                part = mine[start : start + self.microbatch_size]
                with self.trainer.precision_plugin.forward_context():
                    rows = prompt_embeddings(model, collate([prompts[key] for key in part]).to(self.device))
                found |= dict(zip(part, read(rows.double().cpu()), strict=True))
        if world_size == 1:
            return found
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, found)
        return {key: value for part in parts for key, value in part.items()}


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _prompt(example: Example) -> str:
    return example_key(Example(example.prompt_ids)).hex()


def _spread_out(examples: Sequence[Example], desirable: bool, count: int) -> list[Example]:
    """At most `count` rows of a class, evenly spread over the data."""
    rows = [example for example, label in zip(examples, labels(examples), strict=True) if label == desirable]
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else rows
