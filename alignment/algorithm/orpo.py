"""ORPO: likelihood and odds ratio in one stage, without a reference."""

from typing import Any

from torch import Tensor

from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.losses.orpo import orpo


class ORPO(PairModule):
    """ORPO (2403.07691) eqs. 6, 7. The likelihood term is over the chosen completion's tokens, the prompt left out."""

    rewards_per_token: bool = True

    def __init__(self, *passed: Any, beta: float, nll_weight: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.beta, self.nll_weight = beta, nll_weight

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.scores(batch).logprobs
        values, stats = orpo(self.pairs(logprobs, batch), beta=self.beta)
        self.log_stats(stats)
        return self.pair_mean(values, logprobs, batch, nll_weight=self.nll_weight)
