"""Group Relative Policy Optimization and the losses that followed it."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.policy_gradient import PolicyGradientModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.advantages import gdpo_sums, group_advantages, normalize_then_sum


class GRPO(PolicyGradientModule):
    """DeepSeekMath (2402.03300) eq. 3, with the KL term corrected as in DeepSeek-V3.2 (2512.02556).

    `algorithm=grpo` departs from the paper: `loss: dapo`, the mean over all tokens of the optimizer step (DAPO,
    2503.14476) instead of a mean of per-sequence means, so that a token weighs the same in every answer.
    """

    min_group: ClassVar[int] = 2

    def __init__(
        self,
        *passed: Any,
        scale_rewards: Literal["group", "batch", "none", "leave_one_out"],
        normalize: Literal["sum", "each"],
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.scale_rewards, self.normalize = scale_rewards, normalize
        if normalize == "each" and scale_rewards != "group":
            raise UserError(
                f"algorithm.normalize: each reward apart is scaled by its group, not by {scale_rewards}: type "
                "algorithm.scale_rewards=group"
            )
        if normalize == "each" and self.needs_reference and self.kl == "reward":
            raise UserError(
                "algorithm.normalize: with each reward apart there is no one reward that could hold the KL: type "
                "algorithm.kl=k3_corrected"
            )

    def advantages(self, rollout: Batch) -> Tensor:
        if self.normalize == "each":
            return self._each_apart(rollout)
        rewards = self.final_rewards(rollout)
        of = self.global_moments(rewards) if self.scale_rewards == "batch" else None
        return group_advantages(rewards, rollout.group_size, scale=self.scale_rewards, of=of)

    def _each_apart(self, rollout: Batch) -> Tensor:
        """GDPO (2601.05242). Penalties for length and unfinished answers are one more reward, of weight 1."""
        columns, weights = list(rollout.parts.values()), [self.reward_weights[name] for name in rollout.parts]
        if self.missing_eos_penalty or self.overlong_tokens:
            columns, weights = [*columns, self.shaped(torch.zeros_like(columns[0]), rollout)], [*weights, 1.0]
        rewards, scales = torch.stack(columns, -1), torch.tensor(weights, device=columns[0].device)
        of = self.global_moments(gdpo_sums(rewards, scales, rollout.group_size))
        return normalize_then_sum(rewards, scales, rollout.group_size, of=of)
