"""SLiC: a calibration margin between two answers' log-probs, beside the likelihood of a target."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from alignment.losses.dpo import Pairs


def slic(pairs: Pairs, *, margin: float) -> Tensor:
    """max(0, margin - log p(chosen) + log p(rejected)), (B,): SLiC-HF (2305.10425 eq. 1), its rank calibration loss.

    `pairs` has a reference of 0; log-probs are sums, `margin` (delta in the paper) is in nats. The caller adds the
    regulariser, nll_weight (lambda) times the NLL of the target; as a token mean over the step (ruling D23), where the
    paper has a sum per example. Against a reference it is the `hinge` of DPO.
    Raises ValueError for a margin that is not above 0, which would leave equal answers without a gradient.
    """
    if not margin > 0:
        raise ValueError(f"margin must be above 0, got {margin}")
    return F.relu(margin - pairs.margin)
