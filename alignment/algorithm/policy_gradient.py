"""What algorithms share that weigh the log-probs of their own samples by advantages."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from alignment.algorithm.base import OnlineModule, refusal
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.entropy import entropy_threshold, top_entropy_mask
from alignment.losses.grpo import POLICY_LOSSES, PolicyLoss, Result
from alignment.losses.kl import kl_loss, kl_stats, sequence_kl
from alignment.losses.mismatch import CORRECTIONS, on_policy_keep, sampler_gap
from alignment.losses.options import choose
from alignment.losses.reduce import reduce_loss
from alignment.losses.rloo import reinforce_tokens, sequence_clipped_tokens
from alignment.losses.sampling import drop_unfinished, penalize_unfinished, soft_overlong
from alignment.losses.token_rewards import place_scores, rewards_to_go, token_rewards
from alignment.rollout.replay import ReplayBuffer

LOSSES: dict[str, PolicyLoss] = POLICY_LOSSES | {
    "sequence": PolicyLoss(sequence_clipped_tokens, "seq_mean_token_mean"),
    "reinforce": PolicyLoss(reinforce_tokens, "seq_mean_token_sum"),
}
LossName = Literal[
    "grpo",
    "bnpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "gspo_token",
    "luspo",
    "cispo",
    "sapo",
    "vespo",
    "gmpo",
    "sequence",
    "reinforce",
]
ReductionName = Literal[
    "token_mean",
    "microbatch_token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "row_mean_token_sum",
    "constant",
]
KLName = Literal["reward", "k2", "k3", "k3_corrected", "k3_straight_through"]
CorrectionName = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class PolicyGradientModule(OnlineModule):
    """A loss and a reduction, where the KL goes, and what is done to rewards and tokens before; a subclass adds its
    advantages. What is None is off, or as the loss's paper has it; what the chosen loss cannot use is refused.
    """

    reference_need: ClassVar[str] = "beta"
    # Advantages are (N, C): what takes one per completion is refused.
    token_advantages: ClassVar[bool] = False

    def __init__(
        self,
        *passed: Any,
        beta: float,
        kl: KLName,
        loss: LossName,
        reduction: ReductionName | None,
        clip_eps: float | None,
        clip_eps_high: float | None,
        delta: float | None,
        is_weight_min: float | None,
        is_weight_max: float | None,
        tau_pos: float | None,
        tau_neg: float | None,
        k_pos: float | None,
        lambda_pos: float | None,
        k_neg: float | None,
        lambda_neg: float | None,
        missing_eos_penalty: float,
        overlong_tokens: int | None,
        mask_unfinished: bool,
        top_entropy: float,
        sampler_correction: CorrectionName | None,
        sampler_ratio_min: float | None,
        sampler_ratio_max: float | None,
        off_policy_max: float | None,
        max_draws: int,
        num_replay_groups: int,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.kl, self.reduction = beta, kl, reduction or LOSSES[loss].reduction
        self.kl_loss = None if kl == "reward" else kl_loss(kl)
        self.missing_eos_penalty, self.overlong_tokens = missing_eos_penalty, overlong_tokens
        self.mask_unfinished, self.top_entropy, self.off_policy_max = mask_unfinished, top_entropy, off_policy_max
        self.max_draws = max_draws
        if max_draws > 1 and self.group_size < 2:
            raise UserError("algorithm.max_draws: a group of one never differs in reward: type algorithm.max_draws=1")
        self.replay = self._make_replay(num_replay_groups, loss) if num_replay_groups else None
        options = {"clip_eps": clip_eps, "clip_eps_high": clip_eps_high, "delta": delta}
        options |= {"is_weight_min": is_weight_min, "is_weight_max": is_weight_max}
        options |= {"tau_pos": tau_pos, "tau_neg": tau_neg, "k_pos": k_pos, "k_neg": k_neg}
        options |= {"lambda_pos": lambda_pos, "lambda_neg": lambda_neg}
        self.policy_loss = self._choose_loss(loss, options)
        self.correct = _correction(sampler_correction, sampler_ratio_min, sampler_ratio_max)

    def _make_replay(self, capacity: int, loss: str) -> ReplayBuffer:
        if self.group_size > 1 and loss != "reinforce":
            return ReplayBuffer(capacity)
        one, old = "a group of one never differs in reward", "loss=reinforce is for samples of the current policy"
        raise UserError(
            f"algorithm.num_replay_groups: {one if self.group_size == 1 else old}: type algorithm.num_replay_groups=0"
        )

    def _choose_loss(self, name: str, options: dict[str, float | None]):
        shape = (1, 1) if self.token_advantages else (1,)
        try:
            function = choose({name: loss.function for name, loss in LOSSES.items()}, name, **options)
            function(torch.zeros(1, 1), None, torch.zeros(shape), torch.ones(1, 1, dtype=torch.bool))  # its own checks
        except ValueError as error:
            raise refusal(error) from error
        if name == "reinforce" and self.steps_per_rollout > 1:
            raise UserError(
                "algorithm.loss: reinforce is for samples of the current policy, and a rollout is learned from in "
                f"{self.steps_per_rollout} steps: type algorithm.loss=dapo, or 1 for num_iterations and num_minibatches"
            )
        if self.token_advantages and self.off_policy_max is not None:
            raise UserError(
                "algorithm.off_policy_max: it looks at the sign of a completion's advantage, which here differs from "
                "token to token: type algorithm.off_policy_max=null"
            )
        return function

    # ---- between scoring and learning ------------------------------------------------------------------------------
    @torch.no_grad()
    def prepare_rollout(self, rollout: Batch) -> list[Batch]:
        rollout.to(self.device)
        entropy = self.score_tokens(rollout)
        rollout.advantages = self.advantages(rollout)
        if self.mask_unfinished:
            assert rollout.finished is not None
            rollout.loss_mask = drop_unfinished(rollout.loss_mask, rollout.finished)
        if entropy is not None:
            rollout.policy_mask = self._top_entropy(entropy, rollout.loss_mask)
        if self.replay is not None:
            rollout, num_replayed = self.replay.refill(rollout)
            self.meter.add("rollout/replayed", num_replayed, len(rollout.prompt_ids))
        return rollout.split(self.microbatch_size)

    def score_tokens(self, rollout: Batch) -> Tensor | None:
        """What the sampling policy and, where rewards read it, the reference say of the samples; the policy's entropy,
        where it is read.

        From the very pass that training will make, so that the first ratio is exactly 1. With one optimizer step per
        rollout the old log-probs equal the current ones: `old_logprobs` stays None where nothing else needs the pass.
        """
        in_reward, wants_entropy = self.needs_reference and self.kl == "reward", self.top_entropy < 1
        parts = rollout.split(self.microbatch_size)
        scores = []
        if self.steps_per_rollout > 1 or in_reward or wants_entropy or self.replay is not None:
            scores = [self.logprobs(part, entropy=wants_entropy) for part in parts]
            rollout.old_logprobs = torch.cat([score.logprobs for score in scores])
        if in_reward:
            found = [self.reference_logprobs(part) for part in parts]
            rollout.ref_logprobs = torch.cat([logprobs for logprobs in found if logprobs is not None])
        return torch.cat([s.entropy for s in scores if s.entropy is not None]) if wants_entropy else None

    def _top_entropy(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """The tokens that train. The threshold is that of the whole rollout on all ranks, so that it does not depend on
        the microbatch; each rank sends as many numbers as its completions can have tokens."""
        mine = entropy.new_full((len(mask), self.max_new_tokens), torch.nan)
        mine[:, : mask.shape[1]] = torch.where(mask, entropy, torch.nan)
        every = self.all_gather(mine)
        assert isinstance(every, Tensor)
        threshold = entropy_threshold(every[~every.isnan()], keep=self.top_entropy)
        return top_entropy_mask(entropy, mask, keep=self.top_entropy, threshold=threshold)

    # ---- rewards ---------------------------------------------------------------------------------------------------
    def shaped(self, rewards: Tensor, rollout: Batch) -> Tensor:
        """(N,) with the penalties for unfinished and overlong completions taken off."""
        assert rollout.finished is not None
        if self.missing_eos_penalty:
            rewards = penalize_unfinished(rewards, rollout.finished, penalty=self.missing_eos_penalty)
        if self.overlong_tokens:
            lengths = rollout.completion_mask.sum(-1)
            rewards = rewards + soft_overlong(
                lengths, max_tokens=self.max_new_tokens, cache_tokens=self.overlong_tokens
            )
        if self.missing_eos_penalty or self.overlong_tokens:
            self.meter.mean("rollout/shaped_reward", rewards)
        return rewards

    def final_rewards(self, rollout: Batch) -> Tensor:
        """(N,): what advantages are made of; the summed KL is taken off where it belongs to the reward."""
        assert rollout.rewards is not None
        rewards = self.shaped(rollout.rewards, rollout)
        kl = self.rollout_kl(rollout)
        return rewards if kl is None else rewards - self.beta * kl

    def rollout_kl(self, rollout: Batch) -> Tensor | None:
        """KL of each sample, summed over its tokens (N,), logged; None where the reward does not hold it."""
        if self.kl != "reward" or rollout.ref_logprobs is None:
            return None
        assert rollout.old_logprobs is not None
        kl = sequence_kl(rollout.old_logprobs, rollout.ref_logprobs, rollout.loss_mask)
        self.meter.mean("rollout/kl_seq", kl)
        return kl

    def drop_unscored(self, rollout: Batch) -> Tensor:
        """Completions without a score leave the rollout; returns the loss mask."""
        assert rollout.rewards is not None
        rollout.loss_mask = rollout.loss_mask & ~rollout.rewards.isnan()[:, None]
        return rollout.loss_mask

    def returns(self, rollout: Batch, *, gamma: float = 1.0) -> Tensor:
        """Rewards to go (N, C): the score on the last token, the KL on each where it belongs to the reward."""
        assert rollout.rewards is not None
        kl, mask = self.rollout_kl(rollout), self.drop_unscored(rollout)
        scores = self.shaped(rollout.rewards, rollout)
        if kl is None:
            return rewards_to_go(place_scores(scores, mask), mask, gamma=gamma)
        assert rollout.old_logprobs is not None
        rewards, _ = token_rewards(scores, rollout.old_logprobs, rollout.ref_logprobs, mask, beta=self.beta)
        return rewards_to_go(rewards, mask, gamma=gamma)

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.replay is not None:
            checkpoint["replay"] = self.of_every_rank(self.replay.state())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.replay is not None:
            states = checkpoint["replay"]
            self.replay.load(states[self.trainer.global_rank % len(states)])

    # ---- the loss --------------------------------------------------------------------------------------------------
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.logprobs(batch).logprobs
        values, stats = self.token_losses(logprobs, batch)
        loss = self.reduce(values, batch)
        self.log_loss(loss, batch, batch.step_counts[self.reduction])
        self.log_stats(stats, batch.loss_mask)
        return loss

    def token_losses(self, logprobs: Tensor, batch: Batch) -> Result:
        """(N, C), not reduced: the policy's term with its weights, then the KL."""
        assert batch.advantages is not None
        values, stats = self.policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)
        values, more = self.weighted(values, logprobs, batch)
        stats |= more
        if batch.ref_logprobs is not None:
            stats["kl"] = kl_stats(logprobs, batch.ref_logprobs, batch.loss_mask)["kl"]
            if self.kl_loss is not None:
                values = values + self.beta * self.kl_loss(logprobs, batch.ref_logprobs, batch.old_logprobs)
        return values, stats

    def weighted(self, values: Tensor, logprobs: Tensor, batch: Batch) -> Result:
        """Weights against samples of a policy that is not quite this one, and the mask of uncertain tokens."""
        assert batch.sampler_logprobs is not None
        assert batch.advantages is not None
        mask, old = batch.loss_mask, logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        stats = {"sampler_gap": sampler_gap(old, batch.sampler_logprobs, mask).abs()}
        if self.correct is not None:
            weights, stats = self.correct(old, batch.sampler_logprobs, mask)
            values = values * weights
        if self.off_policy_max is not None:
            kept = on_policy_keep(
                logprobs, batch.sampler_logprobs, batch.advantages, mask, threshold=self.off_policy_max
            )
            values = values * kept[:, None]
            stats["on_policy"] = kept[:, None].expand_as(mask).float()
        if batch.policy_mask is not None:
            values = values * batch.policy_mask
        return values, stats

    def reduce(self, values: Tensor, batch: Batch) -> Tensor:
        """This microbatch's share of the step's loss."""
        return reduce_loss(
            values,
            batch.loss_mask,
            self.reduction,
            max_tokens=self.max_new_tokens if self.reduction == "constant" else None,
            count=batch.step_counts[self.reduction],
            scale=self._step_scale(),
        )


def _correction(mode: str | None, low: float | None, high: float | None):
    """Weights for trainer and sampler disagreeing. None = off; bounds without a mode are refused."""
    if mode is None:
        if low is not None or high is not None:
            raise UserError(
                "algorithm.sampler_correction: sampler_ratio_min and sampler_ratio_max bound its weights, and it is "
                "off: type algorithm.sampler_correction=token_truncate"
            )
        return None
    low, high = low or 0.0, high or (3.0 if mode.startswith("sequence") else 2.0)
    if not 0 <= low < high:
        raise UserError(
            f"algorithm.sampler_ratio_min: {low} is not below the largest ratio {high}: type "
            "algorithm.sampler_ratio_min=null"
        )
    return choose(CORRECTIONS, mode, is_weight_min=low, is_weight_max=high)
