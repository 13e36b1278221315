"""CPO: a preference loss without a reference, beside the likelihood of the chosen answers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from alignment.losses.alphapo import alphapo
from alignment.losses.dpo import hinge, ipo, sigmoid
from alignment.losses.simpo import simpo

# CPO (2401.08417) is DPO with a reference of 0, plus alpha * NLL of the chosen answers, a token mean that the caller
# adds after the reduction. `sigmoid` and `hinge` use sums, the others averages; with `simpo` it is CPO-SimPO.
CPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "alphapo": alphapo,
}
