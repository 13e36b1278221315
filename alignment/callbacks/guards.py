"""Watches on-policy runs for the ways in which they go wrong without an error, and says what to do."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L

log = logging.getLogger("alignment")

Row = dict[str, float]
# Rollouts that one mean is taken over. Shorter, and chance would be taken for a trend.
WINDOW = 8
WATCHED = (
    "rollout/reward",
    "rollout/length",
    "rollout/entropy",
    "rollout/repetition",
    "rollout/zero_std_groups",
    "rollout/kl_seq",
    "train/kl",
    "train/clip_ratio/region",
)


class Guards(L.Callback):
    """Each fault is told once, with its remedy; with `stop` the run ends after that rollout and is saved as it is then.

    max_kl: nats per completion from the reference; None = not watched. It looks at metrics alone, which are means over
    all ranks, so every rank sees the same; what it has seen is in the checkpoint, so a resumed run says the same.
    """

    def __init__(self, *, max_kl: float | None, stop: bool) -> None:
        self.max_kl, self.stop = max_kl, stop
        self.first: list[Row] = []
        self.recent: list[Row] = []
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the row of metrics of a rollout's last optimizer step."""
        last = trainer.global_step % module.steps_per_rollout == 0 if module.online else False
        if not last or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        found = list(self.add({name: float(trainer.callback_metrics.get(name, math.nan)) for name in WATCHED}))
        for message in found if trainer.is_global_zero else ():
            log.warning("%s", message)
        if found and self.stop:
            trainer.should_stop = True

    def add(self, row: Row) -> Iterator[str]:
        """Take the metrics of one rollout (NaN = not measured); what is to be told now."""
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.recent = [*self.recent, row][-WINDOW:]
        for name, check in self._checks().items():
            message = None if name in self.told else check()
            if message:
                self.told.append(name)
                yield message

    def _checks(self) -> dict[str, Callable[[], str | None]]:
        checks = {"kl": self._far_from_reference}
        if len(self.recent) == WINDOW:
            checks |= {"groups": self._nothing_to_compare, "clipping": self._clipped}
            checks |= {"entropy": self._entropy_lost, "hacking": self._reward_hacked}
        return checks

    # ---- the faults ------------------------------------------------------------------------------------------------
    def _far_from_reference(self) -> str | None:
        """KL of a completion: measured, or the mean per token times the mean length."""
        row = self.recent[-1]
        kl = row["train/kl"] * row["rollout/length"] if math.isnan(row["rollout/kl_seq"]) else row["rollout/kl_seq"]
        if self.max_kl is None or not kl > self.max_kl:
            return None
        return (
            f"the policy is {kl:.1f} nats per completion away from the reference (guards.max_kl={self.max_kl:g}): what "
            "the reward does not see is being lost. Raise algorithm.beta, lower algorithm.lr, or stop here"
        )

    def _nothing_to_compare(self) -> str | None:
        if not min(row["rollout/zero_std_groups"] for row in self.recent) >= 0.9:
            return None
        return (
            f"in each of the last {WINDOW} rollouts at least 90% of the groups had equal rewards, which teaches "
            "nothing. The prompts are too easy or too hard for this model: choose others (data.*), raise "
            "algorithm.group_size, draw again with algorithm.max_draws=4, or replay with algorithm.num_replay_groups=64"
        )

    def _clipped(self) -> str | None:
        if not min(row["train/clip_ratio/region"] for row in self.recent) >= 0.3:
            return None
        return (
            f"in each of the last {WINDOW} rollouts at least 30% of the tokens were clipped, so their gradient is "
            "lost. Lower algorithm.lr, algorithm.num_iterations or algorithm.num_minibatches"
        )

    def _entropy_lost(self) -> str | None:
        before, now = self._mean(self.first, "rollout/entropy"), self._mean(self.recent, "rollout/entropy")
        if not now < 0.1 * before:
            return None
        return (
            f"the entropy of what is sampled fell from {before:.3g} to {now:.3g} nats per token: little is explored "
            "any more. Raise algorithm.beta or the upper clip (algorithm.clip_eps_high=0.28), or lower algorithm.lr; "
            "where the rewards are as high as they can be, the run is done"
        )

    def _reward_hacked(self) -> str | None:
        """The reward rises while completions become much longer, or repeat themselves."""
        if not self._mean(self.recent, "rollout/reward") > self._mean(self.first, "rollout/reward"):
            return None
        length = self._mean(self.recent, "rollout/length") / max(self._mean(self.first, "rollout/length"), 1.0)
        repeats = [self._mean(rows, "rollout/repetition") for rows in (self.first, self.recent)]
        if length >= 3:
            what = f"completions are {length:.1f} times as long as at first"
        elif repeats[1] - repeats[0] >= 0.25:
            what = f"{repeats[1]:.0%} of the four-token pieces of a completion repeat others, at first {repeats[0]:.0%}"
        else:
            return None
        return (
            f"the reward rises and {what}: it may be the reward that is learned, not the task. Read samples.jsonl; "
            "bound the length (algorithm.overlong_tokens, rollout.max_new_tokens), raise algorithm.beta, mend the "
            "reward"
        )

    @staticmethod
    def _mean(rows: list[Row], name: str) -> float:
        return math.fsum(row[name] for row in rows) / len(rows)

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "recent": self.recent, "told": self.told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.recent = list(state_dict["first"]), list(state_dict["recent"])
        self.told = list(state_dict["told"])
