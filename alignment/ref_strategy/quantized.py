"""The reference is a frozen copy in 8 or 4 bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from alignment.model.quantization import quantization
from alignment.ref_strategy.base import Reference


class Quantized(Reference):
    """A quarter (8 bit) or an eighth (4 bit) of a float32 copy, for a reference that is slightly off.

    The rounding makes the KL of the first step small instead of 0, and the first DPO loss near ln 2 instead of equal.
    NF4 with double quantisation is QLoRA's (2305.14314); 8 bit is LLM.int8() (2208.07339).
    """

    def __init__(self, *, bits: Literal[4, 8]) -> None:
        super().__init__()
        self.bits = bits
        self.model: nn.Module | None = None

    def attach(self, source: Any, policy: nn.Module) -> None:
        self.model = source.frozen(quantization(self.bits))

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        assert self.model is not None, "attach() comes before the first reference pass"
        yield self.model
