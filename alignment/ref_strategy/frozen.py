"""The reference is an explicit frozen copy of the model that training starts from."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Frozen(nn.Module):
    """One more copy of the weights, in eval mode and without gradients; works with full fine-tuning."""

    provides_reference = True
    needs_adapter = False

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None

    def attach(self, source, policy: nn.Module) -> None:
        self.model = source.frozen()

    def train(self, mode: bool = True) -> "Frozen":
        """The reference never leaves eval mode, whatever Lightning does to the module around it."""
        return super().train(False)

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        assert self.model is not None, "attach() comes before the first reference pass"
        yield self.model
