"""Several rewards as one: their weighted sum, with what a reward returns checked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from alignment.batch import Batch
from alignment.errors import UserError

Scored = list[float | None]
Reward = Callable[[list[str], list[dict]], Sequence[float | None]]


# Where rewards find a completion's number of tokens in its row; no dataset column is called that.
NUM_TOKENS = "completion tokens"


# What is measured of every rollout or evaluation under the same prefix as each reward's own scores.
MEASURED = frozenset(
    [
        *("reward", "reward_std", "zero_std_groups", "shaped_reward", "greedy_reward", "reference_reward", "loss"),
        *("mixture_reward", "kept_reward", "kept", "length", "finished", "repetition", "entropy", "kl", "kl_seq"),
        *("draws", "informative", "replayed", "scores_margin", "ties", "win_prob", "beta", "explained_variance"),
    ]
)


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """What rewards see besides each completion's text: its prompt's row, and how many tokens it has."""
    rows = [example.columns for example in batch.examples for _ in range(batch.group_size)]
    lengths = batch.completion_mask.sum(-1).tolist()
    return [row | {NUM_TOKENS: length} for row, length in zip(rows, lengths, strict=True)]


class RewardError(UserError, ValueError):
    """A reward raised, or did not return one finite number or None for each completion. Names the reward."""


@dataclass
class Scores:
    """Scores of N completions. total: weighted sum, None = unscorable. parts: each reward's own, unweighted."""

    total: Scored
    parts: dict[str, Scored]


class RewardSet:
    """Calls every reward on the same completions and adds up.

    A part that is None for all completions of a prompt (it has no answer, no tests, no schema) is left out of their
    sums; the others keep their weights, which are not rescaled. Where it is None for some of them only (a time-out),
    those are unscorable: without it they cannot be compared with the rest. The total is also None where every part with
    a weight is; a reward of weight 0 is measured and decides nothing.

    rewards: name -> (callable, weight). With no rewards every total is None.
    """

    def __init__(self, rewards: Mapping[str, tuple[Reward, float]]) -> None:
        self.rewards = {name: reward for name, (reward, _) in rewards.items()}
        self.weights = {name: float(weight) for name, (_, weight) in rewards.items()}
        for name in sorted(MEASURED & self.weights.keys()):
            raise UserError(f"reward.{name}: there is a metric of that name: give this reward another, as {name}_score")
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise UserError(f"reward.{name}.weight: {weight} is not a finite number")
        if rewards and not any(self.weights.values()):
            raise UserError(f"every reward has weight 0: type reward.{next(iter(rewards))}.weight=1.0")

    def __call__(self, completions: list[str], rows: list[dict], *, group_size: int = 1) -> Scores:
        """Score completions; rows[i] is the dataset row that completion i answers, each row's `group_size` of them
        following each other. Raises RewardError."""
        if len(completions) != len(rows):
            raise ValueError(f"{len(completions)} completions need as many rows, got {len(rows)}")
        parts = {name: self._part(name, completions, rows) for name in self.rewards}
        lost = self._lost(parts, len(rows), group_size)
        totals = [self._total({name: parts[name][i] for name in parts}) for i in range(len(rows))]
        return Scores([None if i in lost else total for i, total in enumerate(totals)], parts)

    def _lost(self, parts: Mapping[str, Scored], count: int, group_size: int) -> set[int]:
        """Completions without a score that others of their group have."""
        lost: set[int] = set()
        for name in parts if group_size > 1 else ():
            for start in range(0, count, group_size) if self.weights[name] else ():
                group = range(start, start + group_size)
                missing = {i for i in group if parts[name][i] is None}
                lost |= missing if len(missing) < group_size else set()
        return lost

    @property
    def counters(self) -> dict[str, int]:
        """Completions lost to time-outs and errors since the start: {"function/timeouts": 2, ...}."""
        return {
            f"{name}/{kind}": count
            for name, reward in self.rewards.items()
            for kind, count in getattr(reward, "counters", {}).items()
        }

    def share(self, policy: Any, source: Any, context: Callable[[], Any]) -> None:
        """Tell rewards that can stand on the policy's own base about it (see `RewardModel.share`)."""
        for reward in self.rewards.values():
            if hasattr(reward, "share"):
                reward.share(policy, source, context)  # pyright: ignore[reportFunctionMemberAccess]

    def close(self) -> None:
        """End the processes that rewards have started."""
        for reward in self.rewards.values():
            if hasattr(reward, "close"):
                reward.close()  # pyright: ignore[reportFunctionMemberAccess]

    def _part(self, name: str, completions: list[str], rows: list[dict]) -> Scored:
        if not completions:
            return []
        where = describe(name, self.rewards[name])
        try:
            scores = self.rewards[name](list(completions), list(rows))
        except UserError as error:
            raise RewardError(f"{where}: {error}") from error
        except Exception as error:  # foreign code: whatever it raises is reported as its own
            raise RewardError(f"{where} raised {type(error).__name__}{_place(error)}: {error}") from error
        return checked(where, scores, len(completions))

    def _total(self, parts: Mapping[str, float | None]) -> float | None:
        terms = [self.weights[name] * part for name, part in parts.items() if part is not None and self.weights[name]]
        return math.fsum(terms) if terms else None


def describe(name: str, reward: Any) -> str:
    """How messages call a reward: its key in the config, and what it is."""
    what = getattr(reward, "name", None) or getattr(reward, "__qualname__", None) or type(reward).__qualname__
    return f"reward '{name}' ({what})"


def checked(where: str, scores: Any, count: int) -> Scored:
    """`count` finite floats or None, from what a reward returned: a list, a tuple, an array or a tensor."""
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if not isinstance(scores, (list, tuple)):
        raise RewardError(f"{where} must return a list of {count} numbers or None, got {scores!r:.200}")
    if len(scores) != count:
        raise RewardError(f"{where} returned {len(scores)} scores for {count} completions: return one for each")
    for i, score in enumerate(scores):
        if score is not None and not _finite(score):
            raise RewardError(
                f"{where} returned {_shown(score)} for completion {i}: return a finite number, or None for a "
                "completion that cannot be scored"
            )
    return [None if score is None else float(score) for score in scores]


def _shown(score: Any) -> str:
    try:
        return f"{score!r:.200}"
    except ValueError:  # more digits than Python writes out
        return f"a whole number of {score.bit_length()} bits"


def _finite(score: Any) -> bool:
    try:
        return isinstance(score, Real) and math.isfinite(score)
    except OverflowError:  # a whole number that no float holds
        return False


def _place(error: Exception) -> str:
    """Where in the foreign code it was raised; an error that comes from a worker brings its own traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
