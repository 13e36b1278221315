"""No reference at all."""

from torch import nn


class NoReference(nn.Module):
    """For algorithms that need no reference; KL to it is then not measured either."""

    provides_reference = False
    needs_adapter = False

    def attach(self, source, policy: nn.Module) -> None:
        """Nothing to build."""
