"""ReMax: the prompt's greedy completion is the baseline."""

from typing import ClassVar

from torch import Tensor

from alignment.algorithm.policy_gradient import PolicyGradientModule
from alignment.batch import Batch
from alignment.losses.advantages import remax_advantages


class ReMax(PolicyGradientModule):
    """ReMax (2310.10505): reward to go less the score of the greedy completion, which is sampled besides, one a prompt.

    The baseline is the plain score, without the penalties that are taken off the samples' rewards.
    """

    greedy_baseline: ClassVar[bool] = True
    token_advantages: ClassVar[bool] = True

    def advantages(self, rollout: Batch) -> Tensor:
        assert rollout.greedy_rewards is not None
        return remax_advantages(self.returns(rollout), rollout.greedy_rewards)
