"""No reference at all."""

from torch import Tensor, nn

from alignment.batch import Batch
from alignment.ref_strategy.base import Reference, Score


class NoReference(Reference):
    """For algorithms that need no reference; the KL to it is then not measured either."""

    provides_reference = False

    def logprobs(self, policy: nn.Module, batch: Batch, score: Score) -> Tensor | None:
        return None
