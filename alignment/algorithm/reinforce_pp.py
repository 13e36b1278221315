"""REINFORCE++, with and without a group baseline."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.policy_gradient import PolicyGradientModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.advantages import centered_tokens, reinforce_plus_plus, reinforce_plus_plus_baseline


class ReinforcePP(PolicyGradientModule):
    """REINFORCE++ (2501.03262) eqs. 8-10: rewards-to-go, whitened over all response tokens of the rollout, all ranks.

    baseline=group: the group's mean is taken off first, and every token of a completion has the same advantage. A
    completion without a score leaves the rollout.
    """

    token_advantages: ClassVar[bool] = True

    def __init__(self, *passed: Any, baseline: Literal["batch", "group"], gamma: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.baseline, self.gamma = baseline, gamma
        if baseline == "group" and self.group_size < 2:
            raise UserError("algorithm.baseline: a group of one is its own mean: type algorithm.group_size=2 or more")
        if baseline == "group" and gamma != 1:
            raise UserError("algorithm.gamma: with a group baseline no token is earlier than another: type 1.0")

    def advantages(self, rollout: Batch) -> Tensor:
        if self.baseline == "batch":
            returns = self.returns(rollout, gamma=self.gamma)
            return reinforce_plus_plus(returns, rollout.loss_mask, of=self.global_moments(returns, rollout.loss_mask))
        rewards, mask = self.final_rewards(rollout), self.drop_unscored(rollout)
        of = self.global_moments(centered_tokens(rewards, mask, rollout.group_size), mask)
        return reinforce_plus_plus_baseline(rewards, mask, rollout.group_size, of=of)
