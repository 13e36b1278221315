"""Groups of earlier rollouts that still teach something, for rollouts that have too few such groups of their own."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from alignment.batch import Batch, Example, concat
from alignment.losses.sampling import informative_groups


class ReplayBuffer:
    """The newest `capacity` groups whose rewards differed, with their advantages and old log-probs.

    Their probability ratios are taken against the policy that sampled them, so the loss sees how far it has moved. The
    idea is that of trl/experimental/grpo_with_replay_buffer (gone since TRL 1.14), which draws at random by advantage
    and keeps groups until better ones come. Here the choice is fixed by what is held, so that a resumed run repeats it:
    the group replayed least often first, then that whose rewards differ most, then the newest.
    """

    def __init__(self, capacity: int) -> None:
        self.groups: deque[tuple[Batch, list[int]]] = deque(maxlen=capacity)  # one prompt each; [times replayed]

    def refill(self, rollout: Batch) -> tuple[Batch, int]:
        """The rollout with groups of equal rewards replaced, as far as there are others; how many were replaced.

        Remembers the rollout's own informative groups afterwards: none is there twice in one rollout.
        """
        assert rollout.rewards is not None
        useful = informative_groups(rollout.rewards, rollout.group_size).tolist()
        own = [prompt for prompt, good in enumerate(useful) if good]
        order = sorted(range(len(self.groups)), key=self._rank)[: len(useful) - len(own)]
        taken = [self.groups[number] for number in order]
        for _, count in taken:
            count[0] += 1
        fresh = [(bare(rollout.pick([prompt])), [0]) for prompt in own]
        self.groups.extend(fresh)
        if not taken:
            return rollout, 0
        kept = iter([prompt for prompt, good in enumerate(useful) if not good][len(taken) :])
        rest = sorted([*own, *kept])
        parts = [bare(rollout.pick(rest))] * bool(rest) + [group for group, _ in taken]
        return concat(parts).to(rollout.rewards.device), len(taken)

    def _rank(self, number: int) -> tuple[int, float, int]:
        group, (count,) = self.groups[number]
        return count, -spread(group.rewards), -number

    def state(self) -> list[dict[str, Any]]:
        """Tensors, numbers and lists alone: what a checkpoint may hold."""
        return [vars(group) | {"examples": [], "count": count} for group, (count,) in self.groups]

    def load(self, state: list[dict[str, Any]]) -> None:
        self.groups.clear()
        for values in state:
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            group = Batch(*(values[name] for name in names))
            vars(group).update({name: value for name, value in values.items() if name != "count"})
            self.groups.append((with_example(group), [values["count"]]))


def bare(batch: Batch) -> Batch:
    """Without rows and texts, which only samples and rewards read, on the CPU."""
    part = batch.pick(range(len(batch.prompt_ids))).to("cpu")
    part.texts, part.parts = [], {}
    return with_example(part)


def with_example(batch: Batch) -> Batch:
    rows = zip(batch.prompt_ids, batch.prompt_mask, strict=True)
    batch.examples = [Example(ids[mask].tolist()) for ids, mask in rows]
    return batch


def spread(rewards: Tensor | None) -> float:
    """Standard deviation of a group's scorable rewards."""
    assert rewards is not None
    return float(rewards[~rewards.isnan()].std(correction=0))
