"""REINFORCE Leave-One-Out."""

from typing import ClassVar

from torch import Tensor

from alignment.algorithm.policy_gradient import PolicyGradientModule
from alignment.batch import Batch
from alignment.losses.advantages import rloo_advantages


class RLOO(PolicyGradientModule):
    """RLOO (2402.14740): the others' mean as baseline, of rewards that hold the KL already (ruling D16).

    `algorithm=rloo` departs from the paper in the loss: a clip per token, since the ratio of a whole answer leaves any
    range at once (ruling D15). `loss=reinforce` is the paper's estimator, `loss=sequence` TRL's.
    """

    min_group: ClassVar[int] = 2

    def advantages(self, rollout: Batch) -> Tensor:
        assert rollout.rewards is not None
        rewards, kl = self.shaped(rollout.rewards, rollout), self.rollout_kl(rollout)
        return rloo_advantages(rewards, kl, rollout.group_size, beta=0.0 if kl is None else self.beta)
