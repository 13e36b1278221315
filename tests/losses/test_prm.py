"""Process rewards: labels, losses, scores of solutions, rewards along a completion."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.prm import (
    SCORES,
    f1,
    f1_counts,
    label_steps,
    solution_score,
    step_binary,
    step_cross_entropy,
    step_rewards,
    step_stats,
)
from alignment.losses.reduce import masked_mean
from alignment.losses.token_rewards import rewards_to_go


def test_prm_step_loss(vector: Callable) -> None:
    v = vector("prm_step_loss")
    logits, labels = v["logits"][None] if v["logits"].dim() == 2 else v["logits"], v["labels"].long()
    values, mask = step_cross_entropy(logits, labels)
    v.check("per_step_ce", values[mask])
    v.check("loss", masked_mean(values, mask))
    prob = logits.softmax(-1)[..., 1]
    v.check("step_prob_good", prob[mask])
    v.check("step_accuracy", step_stats(prob, labels)["accuracy"].nanmean())
    for kind in SCORES:
        v.check(f"score_{kind}", solution_score(prob, mask, kind)[0])


def test_prm_label_layout(vector: Callable) -> None:
    v = vector("prm_label_layout")
    prompt, separator = [int(x) for x in v["prompt_ids"]], [int(x) for x in v["separator_ids"]]
    steps = [[int(x) for x in step] for step in v["steps_ids"]]
    args = (prompt, steps, [int(x) for x in v["step_labels"]], separator)
    ids, labels = label_steps(*args, train_on_last_step_only=v.params["train_on_last_step_only"])
    v.check("input_ids", torch.tensor(ids))
    v.check("labels", torch.tensor(labels))
    v.check("labels_last_step_only", torch.tensor(label_steps(*args, train_on_last_step_only=True)[1]))


def test_labels_stand_on_the_last_separator_token() -> None:
    ids, labels = label_steps([1], [[2]], [True], [8, 9])
    assert (ids, labels) == ([1, 2, 8, 9], [-100, -100, -100, 1])
    with pytest.raises(ValueError, match="2 steps have 1 labels"):
        label_steps([1], [[2], [3]], [True], [8])
    with pytest.raises(ValueError, match="separator_ids"):
        label_steps([1], [[2]], [True], [])


def test_prm_stepwise_to_token_rewards(vector: Callable) -> None:
    v = vector("prm_stepwise_to_token_rewards")
    width, where = int(v["T"]), v["step_end_index"].long()
    ends = torch.zeros(1, width, dtype=torch.bool).index_fill(1, where, True)
    values = torch.zeros(1, width, dtype=torch.float64).index_copy(1, where, v["step_rewards"][None])
    mask = torch.ones(1, width, dtype=torch.bool)
    outcome = torch.tensor([v.params["outcome_reward"]], dtype=torch.float64)
    rewards = step_rewards(values, ends, mask, outcome)
    v.check("token_rewards", rewards[0])
    v.check("returns_gamma1", rewards_to_go(rewards, mask)[0])
    shifted = step_rewards(values, ends, mask, outcome, baseline=0.5)
    torch.testing.assert_close(shifted, rewards - 0.5 * ends)


def test_step_losses_are_torch_cross_entropy() -> None:
    """Value, gradient, and no NaN from a row without labels."""
    logits = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[-100, 1, 0], [-100, -100, -100]])
    values, mask = step_cross_entropy(logits, labels)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(values, wanted)
    ours, theirs = (torch.autograd.grad(x.sum(), logits)[0] for x in (values, wanted))
    torch.testing.assert_close(ours, theirs)
    assert mask.sum() == 2
    assert torch.autograd.gradcheck(lambda z: step_cross_entropy(z, labels)[0], logits)
    # One logit z is the two-class (0, z); half a label is half of each loss.
    one = torch.tensor([[0.7, -1.2]], dtype=torch.float64)
    hard, _ = step_binary(one, torch.tensor([[1.0, 0.0]]).double())
    assert hard[0].tolist() == pytest.approx([math.log(1 + math.exp(-0.7)), math.log(1 + math.exp(-1.2))])
    both = [step_binary(one, torch.full((1, 2), x).double())[0] for x in (0.0, 1.0, 0.5)]
    torch.testing.assert_close(both[2], 0.5 * (both[0] + both[1]))
    ignored, mask = step_binary(one, torch.tensor([[1.0, -100.0]]).double())
    assert ignored[0, 1] == 0
    assert mask.tolist() == [[True, False]]
    far, _ = step_cross_entropy(torch.tensor([[[1e4, -1e4]]]), torch.tensor([[1]]))
    assert torch.isfinite(far).all()


def test_statistics_by_hand() -> None:
    """Row 0: steps said good, bad; truly good, good: the first error was invented. Row 1: bad found. Row 2: none."""
    prob = torch.tensor([[0.9, 0.2], [0.8, 0.3], [0.5, 0.5]])
    labels = torch.tensor([[1, 1], [1, 0], [-100, -100]])
    stats = step_stats(prob, labels)
    assert stats["accuracy"][:2].tolist() == [[1, 0], [1, 1]]
    assert stats["accuracy"][2].isnan().all()
    torch.testing.assert_close(stats["brier"][:2], torch.tensor([[0.01, 0.64], [0.04, 0.09]]))
    assert stats["first_error"][:2].tolist() == [0, 1]
    assert stats["first_error"][2].isnan()
    counts = f1_counts(prob, labels)
    assert counts["good"].tolist() == [2, 2, 3]
    assert counts["bad"].tolist() == [1, 2, 1]
    assert f1(counts["good"]).item() == pytest.approx(0.8)
    assert f1(torch.tensor([0, 0, 0])).isnan()
    assert solution_score(prob, labels != -100, "min")[2].isnan()
    with pytest.raises(ValueError, match="choose from min, prod, last, mean"):
        solution_score(prob, labels != -100, "max")
