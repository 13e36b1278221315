"""Proximal Policy Optimization with a learned critic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.entropy import entropy_bonus
from alignment.losses.kl import kl_loss, kl_stats
from alignment.losses.ppo import explained_share, gae, next_kl_coefficient, ppo_policy_loss, value_loss
from alignment.losses.reduce import whiten
from alignment.losses.token_rewards import token_rewards
from alignment.model.critic import Critic
from alignment.model.logprobs import TokenScores

HORIZON = 10_000


class PPO(OnlineModule):
    """PPO (1707.06347) as used on language models (1909.08593, 2203.02155): a step is a token, the score comes on the
    last one, and the KL to the reference is taken off the reward of each, or added to the loss.

    Departs from those: advantages are whitened over all samples of the rollout on all ranks; means are over all tokens
    of the optimizer step; policy and critic are clipped to the gradient norm each by itself, so that a critic that
    still has everything to learn does not shrink the policy's step. Completions without a score are left out.
    """

    reference_need: ClassVar[str] = "beta"
    min_group: ClassVar[int] = 1

    def __init__(
        self,
        *passed: Any,
        beta: float,
        kl: Literal["reward", "k2", "k3", "k3_corrected", "k3_straight_through"],
        target_kl_per_sequence: float | None,
        kl_horizon: int | None,
        gamma: float,
        gae_lambda: float,
        whiten_advantages: bool,
        missing_eos_penalty: float,
        reward_clip: float | None,
        clip_eps: float,
        clip_eps_high: float | None,
        dual_clip: float | None,
        value_clip_eps: float | None,
        vf_coef: float,
        entropy_coef: float,
        critic: Literal["auto", "adapter", "model", "head", "detached_head"],
        critic_lr: float,
        num_warmup_rollouts: int,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        if target_kl_per_sequence is None and kl_horizon is not None:
            raise UserError(
                "algorithm.kl_horizon: paces the approach to a target and there is none: type "
                "algorithm.target_kl_per_sequence=6"
            )
        if target_kl_per_sequence is not None and not beta:
            raise UserError(
                "algorithm.target_kl_per_sequence: beta=0 stays 0 whatever the KL is: type algorithm.beta=0.05"
            )
        self.beta, self.kl_loss = beta, None if kl == "reward" else kl_loss(kl)
        self.target_kl, self.kl_horizon = target_kl_per_sequence, kl_horizon or HORIZON
        self.gamma, self.gae_lambda, self.whiten_advantages = gamma, gae_lambda, whiten_advantages
        self.missing_eos_penalty, self.reward_clip = missing_eos_penalty, reward_clip
        self.clip_eps, self.clip_eps_high, self.dual_clip = clip_eps, clip_eps_high, dual_clip
        self.value_clip_eps, self.vf_coef, self.entropy_coef = value_clip_eps, vf_coef, entropy_coef
        self.critic_lr, self.num_warmup_rollouts = critic_lr, num_warmup_rollouts
        if critic == "auto":
            critic = "adapter" if self.source.adapter == "lora" else "model"
        self.critic = Critic(critic)

    # ---- building --------------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        fresh = self.policy is None
        super().configure_model()
        assert self.policy is not None
        if fresh:
            self.critic.attach(self.source, self.policy)

    def trained_parameters(self) -> list[Any]:
        assert self.policy is not None
        critic = self.critic.trained(self.policy)
        own = {id(parameter) for parameter in critic}
        policy = [p for p in self.policy.parameters() if p.requires_grad and id(p) not in own]
        return [{"params": policy}, {"params": critic, "lr": self.critic_lr}]

    # ---- between scoring and learning ------------------------------------------------------------------------------
    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        assert rollout.rewards is not None
        rollout.to(self.device)
        rollout.loss_mask = rollout.loss_mask & ~rollout.rewards.isnan()[:, None]
        parts = rollout.split(self.microbatch_size)
        judged = [self.judge(part) for part in parts]
        rollout.old_logprobs = torch.cat([scores.logprobs for scores, _ in judged])
        rollout.values = torch.cat([values for _, values in judged])
        if self.needs_reference:
            found = [self.reference_logprobs(part) for part in parts]
            rollout.ref_logprobs = torch.cat([logprobs for logprobs in found if logprobs is not None])
        rollout.advantages = self.advantages(rollout)
        return rollout.split(self.microbatch_size)

    def judge(self, batch: Batch) -> tuple[TokenScores, Tensor]:
        """Log-probs and entropy of the policy, and values (N, C); in one pass where the critic reads its states.

        The same pass for the rollout as for the steps, so that the first ratio is exactly 1.
        """
        reads = self.critic.reads_policy
        scores = self.logprobs(batch, entropy=True, entropy_grad=self.entropy_coef > 0, states=reads)
        if reads:
            return scores, self.critic.read(scores, batch)
        assert self.policy is not None
        with self.trainer.precision_plugin.forward_context():
            return scores, self.critic(self.policy, batch, path=self.source.shared_prompt)

    def advantages(self, rollout: Batch) -> Tensor:
        """(N, C), of the rewards per token; the returns that the critic learns are left on the rollout."""
        assert rollout.rewards is not None
        assert rollout.old_logprobs is not None
        assert rollout.values is not None
        mask, values = rollout.loss_mask, rollout.values
        rewards, stats = token_rewards(
            rollout.rewards,
            rollout.old_logprobs,
            rollout.ref_logprobs,
            mask,
            beta=0.0 if self.kl_loss else self.beta,
            finished=rollout.finished,
            missing_eos_penalty=self.missing_eos_penalty,
            reward_clip=self.reward_clip,
        )
        advantages, rollout.returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.gae_lambda)
        self._log_rollout(rollout, advantages, {name: value[mask.any(-1)] for name, value in stats.items()})
        if not self.whiten_advantages:
            return advantages
        return whiten(advantages, mask, of=self.global_moments(advantages, mask))

    def _log_rollout(self, rollout: Batch, advantages: Tensor, stats: dict[str, Tensor]) -> None:
        """The numbers of the rollout, (N',) or (N, C); then the KL weight of the next one."""
        assert rollout.values is not None
        assert rollout.returns is not None
        mask, kl = rollout.loss_mask, stats.pop("kl_seq")
        tokens = {"values": rollout.values, "returns": rollout.returns, "advantages": advantages}
        for name, number in tokens.items():
            self.meter.mean(f"rollout/{name}", number, mask)
        residuals = self.global_moments(rollout.returns - rollout.values, mask)
        explained = explained_share(residuals, self.global_moments(rollout.returns, mask))
        self.meter.mean("rollout/explained_variance", explained)
        for name, number in stats.items():
            self.meter.mean(f"rollout/{name}", number)
        if rollout.ref_logprobs is not None:
            self.meter.mean("rollout/kl_seq", kl)
            self.meter.add("rollout/beta", self.beta, 1)
            self._adapt_beta(kl)

    def _adapt_beta(self, kl: Tensor) -> None:
        """The adaptive controller, from the KL of every rank's completions."""
        if self.target_kl is None:
            return
        over = self.global_moments(kl)
        self.beta = next_kl_coefficient(
            self.beta,
            float(over.mean),
            target_kl_per_sequence=self.target_kl,
            num_sequences=int(over.count),
            horizon=self.kl_horizon,
        )

    # ---- the loss --------------------------------------------------------------------------------------------------
    @property
    def warming_up(self) -> bool:
        """Whether only the critic learns."""
        return self.trainer.current_epoch < self.num_warmup_rollouts

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch.values is not None
        assert batch.returns is not None
        scores, values = self.judge(batch)
        policy = self._policy_loss(scores, batch)
        value, stats = value_loss(values, batch.values, batch.returns, clip_eps=self.value_clip_eps)
        self.log_stats(stats | {"policy_loss": policy, "value_loss": value, "values": values}, batch.loss_mask)
        # Times 0, not left out: under DDP every trained weight must take part in every step.
        loss = self.token_mean((0.0 if self.warming_up else 1.0) * policy + self.vf_coef * value, batch)
        self.log_loss(loss, batch, batch.step_tokens)
        return loss

    def _policy_loss(self, scores: TokenScores, batch: Batch) -> Tensor:
        """(N, C): the clipped loss, the KL where it is not in the reward, the entropy bonus."""
        assert batch.advantages is not None
        assert scores.entropy is not None
        logprobs, mask, ref_logprobs = scores.logprobs, batch.loss_mask, batch.ref_logprobs
        values, stats = ppo_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps=self.clip_eps,
            clip_eps_high=self.clip_eps_high,
            dual_clip=self.dual_clip,
        )
        self.log_stats(stats | {"entropy": scores.entropy}, mask)
        if ref_logprobs is not None:
            self.log_stats({"kl": kl_stats(logprobs, ref_logprobs, mask)["kl"]}, mask)
            if self.kl_loss is not None:
                values = values + self.beta * self.kl_loss(logprobs, ref_logprobs, batch.old_logprobs)
        if self.entropy_coef:
            values = values + entropy_bonus(scores.entropy, coefficient=self.entropy_coef)
        return values

    # ---- the step --------------------------------------------------------------------------------------------------
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        for group in optimizer.param_groups:
            part: Any = SimpleNamespace(param_groups=[group])  # all that Lightning's clipping reads of an optimizer
            self.clip_gradients(part, gradient_clip_val, gradient_clip_algorithm)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.warming_up:
            # No gradient, not one of 0: the optimizer's moments and its weight decay leave such weights alone.
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = None

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["beta"] = self.beta

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.beta = checkpoint["beta"]
