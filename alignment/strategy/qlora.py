"""`strategy=qlora`: the base in 4 bit, an adapter on top that trains; spread over devices like `auto`."""

from typing import Any, ClassVar

from alignment.model.quantization import quantization
from alignment.strategy.auto import Auto


class QLoRA(Auto):
    """QLoRA (2305.14314): frozen weights in NF4, LoRA in float32, gradients through the dequantised weights.

    Policy, reference (`lora`: the same weights with the adapter off; `frozen`: another 4-bit copy) and sampling all see
    the same rounded base, so the first DPO loss is ln 2 and the first ratio 1; what rounding costs is that this base is
    not the one in the checkpoint. double_quant: also quantise the constants of the blocks, 0.37 bit a weight less.
    """

    needs_adapter: ClassVar[bool] = True

    def __init__(self, *, double_quant: bool = True) -> None:
        self.double_quant = double_quant

    def prepare(self, source: Any) -> None:
        source.quantization_config = quantization(4, double=self.double_quant)
