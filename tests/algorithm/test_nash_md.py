"""Nash-MD: which sample learns, from what chance of winning, and against whom it is sampled."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.algorithm.nash_md import NashMD
from alignment.callbacks.rollout import RolloutCallback
from alignment.errors import UserError
from alignment.reward.combine import RewardSet
from alignment.rollout.hf import Completions

LENGTHS = [[3, 5], [2, 6], [4, 2], [1, 2]]
# Of each pair the first is the policy's: it loses, wins, is as good; the last pair lacks a score.
REWARDS = [0.0, 1.0, 1.0, 0.25, 0.5, 0.5, 1.0, math.nan]
CHANCES = {"bradley_terry": [1 / (1 + math.e), 1 / (1 + math.exp(-0.75)), 0.5], "win": [0.0, 1.0, 0.5]}


@pytest.mark.parametrize("preference", CHANCES)
def test_the_loss_is_that_of_the_loop_however_it_is_cut(
    online, keys_of, rollout_of, learn, tokens, preference: str
) -> None:
    results = []
    for size in (4, 2, 1):
        changes = {"preference": preference, "microbatch_size": size, "num_prompts": 4}
        module = online(NashMD, **(keys_of("nash_md") | changes))
        rollout = rollout_of(LENGTHS, REWARDS)
        policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
        results.append(learn(module, module.prepare_rollout(rollout)))
    total, kl = 0.0, 0.0
    for pair, chance in enumerate(CHANCES[preference]):
        own = sum(policy[2 * pair])
        gap = own - sum(reference[2 * pair])
        total += (0.1 * gap - (chance - 0.5)) * own
        kl += gap
    for value, gradient, metrics in results:
        assert value == pytest.approx(total / 3, rel=1e-4)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)
        assert metrics["rollout/win_prob"] == pytest.approx(sum(CHANCES[preference]) / 3)
        assert metrics["train/kl_seq"] == pytest.approx(kl / 3, rel=1e-3)


def test_the_gradient_is_the_policys_alone(online, keys_of, rollout_of, learn) -> None:
    """Other tokens in the mixture's sample, with the same reward, are the same step."""
    gradients = []
    for changed in (False, True):
        module = online(NashMD, **(keys_of("nash_md") | {"microbatch_size": 2}))
        rollout = rollout_of([[3, 5], [2, 6]], [0.0, 1.0, 1.0, 0.0])
        if changed:
            rollout.completion_ids[1::2] = 7
        gradients.append(learn(module, module.prepare_rollout(rollout))[1])
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_an_answer_without_an_end_is_worth_less(online, keys_of, rollout_of) -> None:
    """0.9 less 0.5 is behind 0.6."""
    changes = {"missing_eos_penalty": 0.5, "preference": "win", "microbatch_size": 1, "num_prompts": 1}
    module = online(NashMD, **(keys_of("nash_md") | changes))
    module.prepare_rollout(rollout_of([[3, 5]], [0.9, 0.6], [False, True]))
    assert module.meter.flush()["rollout/win_prob"] == 0


class Engine:
    """The policy says 5, the reference 6, a mixture 7; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []

    def sync(self, policy) -> None: ...

    def generate(self, policy, prompts, *, group_size, seed, mixture=None, **settings) -> Completions:
        self.asked.append((seed, mixture))
        assert group_size == 1
        token = 7 if mixture else 6 if policy == "the reference" else 5
        rows = [[token] * (2 + n) for n in range(len(prompts))]
        return Completions(rows, [[-0.5] * len(row) for row in rows], [True] * len(rows))


@pytest.mark.parametrize(("coef", "opponent"), [(0.0, 5), (0.5, 7), (1.0, 6)])
def test_the_opponent_is_sampled_from_the_mixture(online, keys_of, rollout_of, coef: float, opponent: int) -> None:
    module = online(NashMD, **(keys_of("nash_md") | {"mixture_coef": coef, "microbatch_size": 2, "num_prompts": 3}))
    module.source.stop_ids = {2}
    module.source.tokenizer = SimpleNamespace(
        pad_token_id=0, batch_decode=lambda ids, skip_special_tokens: ["x" * len(row) for row in ids]
    )

    @contextmanager
    def scoring_model(policy: Any):
        yield "the reference"

    module.reference.scoring_model = scoring_model
    rewards = RewardSet({"characters": (lambda completions, rows: [float(len(c)) for c in completions], 1.0)})
    engine = Engine()
    prompts = rollout_of(LENGTHS[:3], REWARDS[:6]).examples
    trainer: Any = SimpleNamespace(
        datamodule=SimpleNamespace(prompts_for=lambda number: prompts),
        global_rank=0,
        global_step=0,
        precision_plugin=module.trainer.precision_plugin,
    )
    rollout = RolloutCallback(engine, rewards, seed=0).collect(trainer, module)
    assert rollout.completion_ids[:, 0].tolist() == [5, opponent] * 3
    assert rollout.from_reference is not None
    assert rollout.from_reference.tolist() == [False, True] * 3
    (own, nothing), (other, mixture) = engine.asked
    assert own != other  # not the same randomness for both
    assert nothing is None
    if opponent == 7:
        assert mixture.coef == coef
        with mixture.other() as model:
            assert model == "the reference"
    assert f"rollout/{'reference' if coef == 1 else 'mixture'}_reward" in module.meter.flush()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 4}, r"algorithm\.group_size: .*type algorithm\.group_size=2"),
        ({"num_iterations": 2}, r"algorithm\.num_minibatches: .* 2 steps: type 1 for num_iterations"),
    ],
)
def test_what_cannot_be_is_refused(online, keys_of, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        online(NashMD, **(keys_of("nash_md") | {"microbatch_size": 2} | changes))
