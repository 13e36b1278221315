"""The reference is an explicit frozen copy of the model that training starts from."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from alignment.ref_strategy.base import Reference


class Frozen(Reference):
    """One more copy of the weights, without gradients; works with full fine-tuning.

    With `offload` the copy waits in the machine's main memory and visits the accelerator for each pass only: a copy of
    the weights over the bus per microbatch, for one model less on the accelerator.
    """

    def __init__(self, *, offload: bool = False) -> None:
        super().__init__()
        self.offload = offload
        self._held: list[nn.Module] = []  # a list hides an offloaded copy from Module.to()
        self.model: nn.Module | None = None

    def attach(self, source: Any, policy: nn.Module) -> None:
        copy = source.frozen()
        if self.offload:
            self._held.append(copy)
        else:
            self.model = copy

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        if not self.offload:
            assert self.model is not None, "attach() comes before the first reference pass"
            yield self.model
            return
        (copy,) = self._held
        try:
            yield copy.to(next(policy.parameters()).device)
        finally:
            copy.to("cpu")
