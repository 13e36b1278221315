"""Group Relative Policy Optimization."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.losses.advantages import group_advantages
from alignment.losses.grpo import clipped_policy_loss
from alignment.losses.kl import corrected_k3, kl_stats


class GRPO(OnlineModule):
    """DeepSeekMath (2402.03300) eq. 3, with the KL term corrected as in DeepSeek-V3.2 (2512.02556).

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

    def advantages(self, rollout: Batch) -> Tensor:
        assert rollout.rewards is not None
        return group_advantages(rollout.rewards, rollout.group_size, scale=self.scale_rewards)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch.advantages is not None
        logprobs, mask, ref_logprobs = self.logprobs(batch).logprobs, batch.loss_mask, batch.ref_logprobs
        values, stats = clipped_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps=self.clip_eps,
            clip_eps_high=self.clip_eps_high,
        )
        if ref_logprobs is not None:
            values = values + self.beta * corrected_k3(logprobs, ref_logprobs, batch.old_logprobs)
            self.log_stats({"kl": kl_stats(logprobs, ref_logprobs, mask)["kl"]}, mask)
        loss = self.token_mean(values, batch)
        self.log_loss(loss, batch, batch.step_tokens)
        self.log_stats(stats, mask)
        return loss
