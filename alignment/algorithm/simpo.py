"""SimPO and AlphaPO: average log-probs as rewards, no reference."""

from typing import Any

from torch import Tensor

from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.losses.alphapo import alphapo
from alignment.losses.simpo import simpo


class SimPO(PairModule):
    """SimPO (2405.14734) eq. 6; with alpha > 0 AlphaPO (2501.03884). `nll_weight` > 0 makes it CPO-SimPO."""

    rewards_per_token: bool = True

    def __init__(
        self,
        *passed: Any,
        beta: float,
        gamma_beta_ratio: float,
        alpha: float,
        label_smoothing: float,
        nll_weight: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.alpha, self.nll_weight = beta, alpha, nll_weight
        self.options = {"beta": beta, "gamma_beta_ratio": gamma_beta_ratio, "label_smoothing": label_smoothing}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.scores(batch).logprobs
        pairs = self.pairs(logprobs, batch)
        values = alphapo(pairs, alpha=self.alpha, **self.options) if self.alpha else simpo(pairs, **self.options)
        return self.pair_mean(values, logprobs, batch, nll_weight=self.nll_weight)
