"""CPO: a preference loss without a reference, beside the likelihood of the chosen answers."""

from typing import Any, Literal

from torch import Tensor

from alignment.algorithm.base import refusal
from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.losses.cpo import CPO_LOSSES
from alignment.losses.options import choose


class CPO(PairModule):
    """CPO (2401.08417): DPO's loss with a uniform reference, plus nll_weight times the NLL of the chosen answers."""

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: Literal["sigmoid", "hinge", "ipo"],
        label_smoothing: float,
        nll_weight: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.nll_weight = beta, nll_weight
        try:
            self.pair_loss = choose(CPO_LOSSES, loss, beta=beta, label_smoothing=label_smoothing or None)
        except ValueError as error:
            raise refusal(error) from error

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.scores(batch).logprobs
        values = self.pair_loss(self.pairs(logprobs, batch))
        return self.pair_mean(values, logprobs, batch, nll_weight=self.nll_weight)
