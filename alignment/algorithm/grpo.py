"""Group Relative Policy Optimization."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.losses.advantages import group_advantages
from alignment.losses.grpo import clipped_policy_loss


class GRPO(OnlineModule):
    """DeepSeekMath (2402.03300) eq. 3, with the corrected KL term of ruling D12.

    Departs from the paper: the mean is over all tokens of the optimizer step (DAPO, 2503.14476) instead of a mean of
    per-sequence means, so that a token weighs the same in a short and in a long answer.
    """

    reference_need: ClassVar[str] = "beta"
    min_group: ClassVar[int] = 2

    def __init__(
        self,
        *passed: Any,
        beta: float,
        clip_eps: float,
        clip_eps_high: float | None,
        scale_rewards: Literal["group", "batch", "none"],
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.clip_eps, self.clip_eps_high, self.scale_rewards = beta, clip_eps, clip_eps_high, scale_rewards
