"""Which runs are warned of, when, and that it is said once."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from alignment.callbacks.guards import WATCHED, WINDOW, Guards

GOOD = {
    "rollout/reward": 0.5, "rollout/length": 20.0, "rollout/entropy": 0.8, "rollout/repetition": 0.05,
    "rollout/zero_std_groups": 0.3, "rollout/kl_seq": math.nan, "train/kl": 0.01, "train/clip_ratio/region": 0.01,
}  # fmt: skip


def told(*later: dict[str, float], max_kl: float | None = 10) -> list[str]:
    """What is said after WINDOW good rollouts and then these."""
    guards = Guards(max_kl=max_kl, stop=False)
    return [message for row in [{}] * WINDOW + list(later) for message in guards.add(GOOD | row)]


def test_a_good_run_is_left_alone() -> None:
    assert set(GOOD) == set(WATCHED)
    assert told(*[{"rollout/reward": 0.9, "rollout/length": 30.0}] * 20) == []


def test_metrics_that_are_not_measured_say_nothing() -> None:
    guards = Guards(max_kl=10, stop=False)
    assert [m for _ in range(20) for m in guards.add(dict.fromkeys(WATCHED, math.nan))] == []


@pytest.mark.parametrize(
    ("row", "rollouts", "said"),
    [
        ({"train/kl": 0.6}, 1, "12.0 nats per completion"),  # 0.6 * 20 tokens
        ({"rollout/kl_seq": 11.0}, 1, "11.0 nats per completion"),
        ({"rollout/zero_std_groups": 0.95}, WINDOW, "equal rewards"),
        ({"train/clip_ratio/region": 0.4}, WINDOW, "were clipped"),
        ({"rollout/entropy": 0.05}, WINDOW, "fell from 0.8 to 0.05 nats"),
        ({"rollout/reward": 0.9, "rollout/length": 80.0}, 6, "times as long"),
        ({"rollout/reward": 0.9, "rollout/repetition": 0.5}, 5, "of the four-token pieces"),
    ],
)
def test_each_fault_is_told_once_with_a_remedy(row: dict[str, float], rollouts: int, said: str) -> None:
    (message,) = told(*[row] * 30)
    assert said in message
    assert "algorithm." in message
    assert told(*[row] * (rollouts - 1)) == []


def test_longer_answers_without_more_reward_are_no_hacking() -> None:
    assert told(*[{"rollout/reward": 0.4, "rollout/length": 80.0}] * 20) == []


def test_no_bound_no_warning() -> None:
    assert told({"rollout/kl_seq": 100.0}, max_kl=None) == []


def step(guards: Guards, metrics: dict[str, float], global_step: int = 2) -> Any:
    trainer = SimpleNamespace(
        global_step=global_step,
        accumulate_grad_batches=1,
        callback_metrics=metrics,
        is_global_zero=True,
        should_stop=False,
    )
    guards.on_train_batch_end(trainer, SimpleNamespace(online=True, steps_per_rollout=2), None, None, 0)
    return trainer


def test_a_run_is_stopped_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    far = GOOD | {"rollout/kl_seq": 20.0}
    with caplog.at_level(logging.WARNING, "alignment"):
        assert step(Guards(max_kl=10, stop=True), far).should_stop
        assert not step(Guards(max_kl=10, stop=False), far).should_stop
    assert caplog.text.count("20.0 nats") == 2


def test_only_the_last_step_of_a_rollout_counts() -> None:
    guards = Guards(max_kl=10, stop=True)
    assert not step(guards, GOOD | {"rollout/kl_seq": 20.0}, global_step=1).should_stop
    assert guards.recent == []


def test_a_resumed_run_does_not_repeat_itself() -> None:
    guards = Guards(max_kl=10, stop=False)
    assert list(guards.add(GOOD | {"rollout/kl_seq": 20.0}))
    resumed = Guards(max_kl=10, stop=False)
    resumed.load_state_dict(guards.state_dict())
    assert list(resumed.add(GOOD | {"rollout/kl_seq": 20.0})) == []
    assert resumed.first[0]["rollout/kl_seq"] == 20.0
