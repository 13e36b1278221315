"""What a reference is: a value on the batch, and a strategy that fills it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from alignment.batch import Batch

# Scores a batch under a model: the same function for policy and reference, so that they agree bit for bit.
Score = Callable[[nn.Module, Batch], Tensor]


class Reference(nn.Module):
    """Base of all strategies. The class attributes are literals: validation reads them without importing this file."""

    # False only for `none`.
    provides_reference: ClassVar[bool] = True
    # Works only while the policy trains an adapter.
    needs_adapter: ClassVar[bool] = False
    # Follows the policy, so its log-probs of a fixed dataset change during training.
    moves: ClassVar[bool] = False
    # Knows the log-probs of a fixed dataset only.
    offline_only: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.report: dict[str, float] = {}  # numbers about its own work, for the run's summary

    def attach(self, source: Any, policy: nn.Module) -> None:
        """Build what the strategy holds, once, right after the policy was built."""

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The model that gives the reference's log-probs."""
        yield policy

    def logprobs(self, policy: nn.Module, batch: Batch, score: Score) -> Tensor | None:
        """(N, C) float32, or None where this strategy cannot know them."""
        with self.scoring_model(policy) as model:
            return score(model, batch)

    def prepare(self, module: Any, data: Any) -> None:
        """Before the first step of a fit."""

    def after_step(self, policy: nn.Module, step: int) -> None:
        """After optimizer step `step` (1, 2, ...)."""

    def checkpointed(self, name: str) -> bool:
        """Whether the parameter `name` of the module belongs into checkpoints for this reference's sake."""
        return False

    def train(self, mode: bool = True) -> Reference:
        """A reference never leaves eval mode, whatever Lightning does to the module around it."""
        return super().train(False)
