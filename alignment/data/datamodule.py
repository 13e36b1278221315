"""What the Trainer iterates over: a planned stream of microbatches (offline), or the buffer of one rollout (online).

The order of the data is a pure function of (seed, position), never of Lightning's epoch, so resuming needs no sampler
state: the stream goes on at the restored optimizer step, the rollout at the restored epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from alignment.batch import Batch, Example, collate


class Stream:
    """Endless shuffled passes over `num_rows` rows; the k-th index of the stream depends on (seed, k) alone."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed = num_rows, seed
        self._passes: dict[int, Tensor] = {}  # as tensors: a list of millions of numbers is large

    def take(self, start: int, count: int) -> list[int]:
        """Indices start .. start + count - 1 of the stream."""
        return [int(self._permutation(k // self.num_rows)[k % self.num_rows]) for k in range(start, start + count)]

    def _permutation(self, number: int) -> Tensor:
        if number not in self._passes:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            if len(self._passes) > 2:  # a step reaches into two passes at most, unless the data are tiny
                self._passes.clear()
            self._passes[number] = torch.randperm(self.num_rows, generator=generator)
        return self._passes[number]


class StepStream(Dataset):
    """Microbatch i of a run over a fixed dataset, with the token count of its whole optimizer step.

    Step s takes `batch_size` consecutive rows of the stream: passes over the data run into each other, so no row is
    dropped and no step is smaller than the others. The rows of a step are sorted by length before they are cut into
    microbatches, which leaves the step's gradient as it is and its padding small.

    length_window: so many steps share their rows out by length, and follow each other in random order: rows of one step
    are then alike, at the price of steps that are no random draw. The window of rows stays the same, each once.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        microbatch_size: int,
        total_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        length_window: int = 1,
    ) -> None:
        self.examples, self.batch_size, self.microbatch_size = examples, batch_size, microbatch_size
        self.rank, self.world_size = rank, world_size
        self.num_microbatches = batch_size // (microbatch_size * world_size)
        self.total_steps = total_steps
        self.stream, self.length_window = Stream(len(examples), seed), length_window
        self._window: tuple[int, list[Example]] = (-1, [])

    def __len__(self) -> int:
        return self.total_steps * self.num_microbatches

    def rows(self, step: int) -> list[Example]:
        """The rows of an optimizer step over all ranks, longest first."""
        window, place = divmod(step, self.length_window)
        first = window * self.length_window
        steps = min(self.length_window, self.total_steps - first)  # the last window is what is left of the run
        if self._window[0] != window:
            indices = self.stream.take(first * self.batch_size, steps * self.batch_size)
            self._window = window, sorted((self.examples[i] for i in indices), key=_length, reverse=True)
        generator = torch.Generator().manual_seed(self.stream.seed * 1_000_033 + window)
        place = torch.randperm(steps, generator=generator).tolist()[place]
        return self._window[1][place * self.batch_size : (place + 1) * self.batch_size]

    def __getitem__(self, index: int) -> Batch:
        step, microbatch = divmod(index, self.num_microbatches)
        rows = self.rows(step)
        start = (microbatch * self.world_size + self.rank) * self.microbatch_size
        batch = collate(rows[start : start + self.microbatch_size])
        batch.step_tokens = float(sum(sum(row.loss_tokens) for row in rows))
        batch.step_chosen_tokens = float(sum(row.loss_tokens[0] for row in rows))
        batch.step_examples = float(self.batch_size)
        return batch


def _length(example: Example) -> int:
    return len(example.prompt_ids) + sum(map(len, example.completions))


def _loader(dataset: Dataset, order: Iterable[int] | None = None) -> DataLoader:
    """Ready batches in a given order. With a generator of its own: every new iterator draws a seed, and drawn from
    the global one it would shift the dropout of a resumed or evaluated run."""
    return DataLoader(dataset, batch_size=None, sampler=order, generator=torch.Generator())


class FromStep(Sampler[int]):
    """Indices from the trainer's current optimizer step on; its length stays that of the whole run."""

    def __init__(self, steps: StepStream, trainer: L.Trainer) -> None:
        self.steps, self.trainer = steps, trainer

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.trainer.global_step * self.steps.num_microbatches, len(self.steps)))


class AlignmentData(L.LightningDataModule):
    """Held-out data, the same for every algorithm: prompts to sample from, and examples with a loss."""

    def __init__(self, heldout_prompts: Sequence[Example], heldout: Sequence[Example], *, eval_batch_size: int) -> None:
        super().__init__()
        self.heldout_prompts, self.heldout, self.eval_batch_size = heldout_prompts, heldout, eval_batch_size
        # What became of the rows, by set of examples: for the run's records.
        self.reports: dict[str, dict[str, Any]] = {}

    @property
    def val_sets(self) -> list[Sequence[Example]]:
        return [rows for rows in (self.heldout_prompts, self.heldout) if rows]

    def val_dataloader(self) -> list[DataLoader]:
        batches = [_Collated(rows, self.eval_batch_size, *self._rank()) for rows in self.val_sets]
        return [_loader(dataset) for dataset in batches]

    def _rank(self) -> tuple[int, int]:
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size


class _Collated(Dataset):
    """Held-out examples in fixed batches; every rank has equally many, the last ones possibly smaller."""

    def __init__(self, rows: Sequence[Example], size: int, rank: int, world_size: int) -> None:
        mine = range(rank, len(rows), world_size)[: len(rows) // world_size or 1]
        self.rows, self.batches = rows, [mine[i : i + size] for i in range(0, len(mine), size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return collate([self.rows[i] for i in self.batches[index]])


class OfflineData(AlignmentData):
    """A fixed dataset as one long Lightning epoch of `total_steps` optimizer steps."""

    def __init__(
        self,
        train: Sequence[Example],
        heldout: Sequence[Example],
        heldout_prompts: Sequence[Example],
        *,
        batch_size: int,
        microbatch_size: int,
        total_steps: int,
        eval_batch_size: int,
        seed: int,
        length_window: int = 1,
    ) -> None:
        super().__init__(heldout_prompts, heldout, eval_batch_size=eval_batch_size)
        self.train, self.seed, self.total_steps, self.length_window = train, seed, total_steps, length_window
        self.steps: StepStream | None = None
        self.batch_size, self.microbatch_size = batch_size, microbatch_size

    def train_dataloader(self) -> DataLoader:
        rank, world_size = self._rank()
        steps = self.steps = StepStream(
            self.train,
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            total_steps=self.total_steps,
            rank=rank,
            world_size=world_size,
            seed=self.seed,
            length_window=self.length_window,
        )
        assert self.trainer is not None
        return _loader(steps, FromStep(steps, self.trainer))


class RolloutBuffer(Dataset):
    """The current rollout as a fixed number of ready microbatches.

    The length is constant: an unsized or empty loader would be prefetched before the first rollout exists.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.microbatches: list[Batch] = []
        self.sampled: Batch | None = None

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, index: int) -> Batch:
        return self.microbatches[index]

    def fill(self, microbatches: list[Batch], sampled: Batch) -> None:
        """What is learned from, and the whole rollout, of which that may be a part."""
        if len(microbatches) != self.num_microbatches:
            raise RuntimeError(f"a rollout of {len(microbatches)} microbatches, {self.num_microbatches} were planned")
        self.microbatches, self.sampled = microbatches, sampled


class OnlineData(AlignmentData):
    """Prompts, and the buffer that RolloutCallback fills once per Lightning epoch."""

    def __init__(
        self,
        prompts: Sequence[Example],
        heldout_prompts: Sequence[Example],
        *,
        num_prompts: int,
        num_microbatches: int,
        num_iterations: int,
        eval_batch_size: int,
        seed: int,
    ) -> None:
        super().__init__(heldout_prompts, [], eval_batch_size=eval_batch_size)
        self.prompts, self.num_prompts, self.num_iterations = prompts, num_prompts, num_iterations
        self.rollouts = RolloutBuffer(num_microbatches)
        self.stream = Stream(len(prompts), seed)

    def prompts_for(self, rollout: int) -> list[Example]:
        """This rank's prompts of one rollout; no prompt comes twice before all have come once."""
        rank, world_size = self._rank()
        indices = self.stream.take(rollout * self.num_prompts, self.num_prompts)
        return [self.prompts[i] for i in indices[rank::world_size]]

    def train_dataloader(self) -> DataLoader:
        order = list(range(len(self.rollouts))) * self.num_iterations
        return _loader(self.rollouts, order)
