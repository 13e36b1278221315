"""Online DPO: which samples make a pair, and the loss of the pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alignment.algorithm.online_dpo import OnlineDPO
from alignment.errors import UserError

LENGTHS = [[3, 5, 1], [2, 6, 4], [4, 2, 3], [1, 2, 2]]
REWARDS = [0.0, 1.0, 0.5, 0.25, 0.25, 0.25, math.nan, 0.2, 0.1, 1.0, math.nan, math.nan]
FINISHED = [True] * 11 + [False]
# (1, 0); the second prompt's are equal; (7, 8), the one without a score stands aside; the last has one score alone.
PAIRS = [(1, 0), (7, 8)]


def logistic(x: float) -> float:
    return math.log1p(math.exp(-x))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_the_loss_is_that_of_the_loop_however_it_is_cut(online, keys_of, rollout_of, learn, tokens, loss: str) -> None:
    results = []
    for size in (8, 4, 2):
        changes = {"loss": loss, "group_size": 3, "microbatch_size": size, "num_prompts": 4}
        module = online(OnlineDPO, **(keys_of("online_dpo") | changes))
        rollout = rollout_of(LENGTHS, REWARDS, FINISHED)
        policy, reference = tokens(module.policy, rollout), tokens(module.reference.model, rollout)
        batches = module.prepare_rollout(rollout)
        results.append(learn(module, batches))
    terms, right = [], 0
    for chosen, rejected in PAIRS:
        a, b = (sum(policy[n]) - sum(reference[n]) for n in (chosen, rejected))
        right += a > b
        per_token = a / len(policy[chosen]) - b / len(policy[rejected])
        each = {"sigmoid": logistic(0.1 * (a - b)), "hinge": max(0.0, 1 - 0.1 * (a - b))}
        each["ipo"] = (per_token - 1 / (2 * 0.1)) ** 2
        terms.append(each[loss])
    for value, gradient, metrics in results:
        assert value == pytest.approx(sum(terms) / 2, rel=1e-4)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)
        assert metrics["train/rewards/accuracies"] == pytest.approx(right / 2)
        assert metrics["rollout/ties"] == 0.5
        assert metrics["rollout/scores_margin"] == pytest.approx((1.0 + 0.0 + 0.1) / 3)


def test_an_answer_without_an_end_is_worth_less(online, keys_of, rollout_of) -> None:
    """0.9 less 0.5 is behind 0.6."""
    changes: dict[str, Any] = {"missing_eos_penalty": 0.5, "microbatch_size": 2, "num_prompts": 1}
    module = online(OnlineDPO, **(keys_of("online_dpo") | changes))
    rollout = rollout_of([[3, 5]], [0.9, 0.6], [False, True])
    ids = rollout.completion_ids.clone()
    (batch,) = module.prepare_rollout(rollout)
    assert batch.completion_ids.tolist() == ids[[1, 0]].tolist()
    assert batch.rewards.tolist() == pytest.approx([0.6, 0.9])


def test_a_rollout_without_any_pair_changes_nothing(online, keys_of, rollout_of, learn) -> None:
    module = online(OnlineDPO, **(keys_of("online_dpo") | {"microbatch_size": 4}))
    loss, gradient, _ = learn(module, module.prepare_rollout(rollout_of([[3, 5], [2, 4]], [1.0, 1.0, 0.0, 0.0])))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatch_size": 1}, r"algorithm\.microbatch_size: .*microbatch_size=2"),
        ({"loss": "ipo", "label_smoothing": 0.1}, r"algorithm\.loss: ipo cannot use label_smoothing"),
        ({"length_average": True}, r"algorithm\.loss: sigmoid cannot use length_average"),
    ],
)
def test_what_cannot_be_is_refused(online, keys_of, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        online(OnlineDPO, **(keys_of("online_dpo") | changes))
