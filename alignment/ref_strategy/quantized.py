"""The reference is a frozen copy in 8 or 4 bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig

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


def quantization(bits: int) -> BitsAndBytesConfig:
    """transformers' configuration of a bitsandbytes model in 4 or 8 bit."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
