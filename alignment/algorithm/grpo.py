"""Group Relative Policy Optimization and the losses that followed it."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.policy_gradient import PolicyGradientModule
from alignment.batch import Batch
from alignment.losses.advantages import group_advantages
from alignment.losses.grpo import Result
from alignment.losses.kl import kl_loss, kl_stats


class GRPO(PolicyGradientModule):
    """DeepSeekMath (2402.03300) eq. 3, with the KL term corrected as in DeepSeek-V3.2 (2512.02556).

    `algorithm=grpo` departs from the paper: `loss: dapo`, the mean over all tokens of the optimizer step (DAPO,
    2503.14476) instead of a mean of per-sequence means, so that a token weighs the same in every answer.
    """

    reference_need: ClassVar[str] = "beta"
    min_group: ClassVar[int] = 2

    def __init__(
        self,
        *passed: Any,
        kl: Literal["k2", "k3", "k3_corrected", "k3_straight_through"],
        scale_rewards: Literal["group", "batch", "none", "leave_one_out"],
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.kl_loss, self.scale_rewards = kl_loss(kl), scale_rewards

    def advantages(self, rollout: Batch) -> Tensor:
        assert rollout.rewards is not None
        of = self.global_moments(rollout.rewards) if self.scale_rewards == "batch" else None
        return group_advantages(rollout.rewards, rollout.group_size, scale=self.scale_rewards, of=of)

    def token_losses(self, logprobs: Tensor, batch: Batch) -> Result:
        values, stats = super().token_losses(logprobs, batch)
        if batch.ref_logprobs is None:
            return values, stats
        values = values + self.beta * self.kl_loss(logprobs, batch.ref_logprobs, batch.old_logprobs)
        return values, stats | {"kl": kl_stats(logprobs, batch.ref_logprobs, batch.loss_mask)["kl"]}
