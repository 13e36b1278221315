"""SLiC: chosen answers are to be likelier than rejected ones by a margin, without a reference."""

from typing import Any

from torch import Tensor

from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.slic import slic


class SLiC(PairModule):
    """SLiC-HF (2305.10425) eq. 1 on pairs: the margin loss plus nll_weight times the NLL of the target.

    The target is the chosen answer, as the paper's better candidate; it also tries the SFT data's own answer, which
    pairs do not carry. Rewards in the logs are plain log-probs.
    """

    def __init__(self, *passed: Any, margin: float, nll_weight: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        if not margin > 0:
            raise UserError(f"algorithm.margin: {margin} must be above 0: type algorithm.margin=1")
        self.beta, self.margin, self.nll_weight = 1.0, margin, nll_weight

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.scores(batch).logprobs
        values = slic(self.pairs(logprobs, batch), margin=self.margin)
        return self.pair_mean(values, logprobs, batch, nll_weight=self.nll_weight)
