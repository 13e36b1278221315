"""BCO's loss and shift by hand, and its prompt weights against another logistic regression's optimality."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.algorithm import bco
from alignment.algorithm.bco import BCO
from alignment.batch import Batch, Example
from alignment.errors import UserError

RTOL = 1e-5
OPTIONS: dict[str, Any] = {"beta": 0.3, "shift": "midpoint", "density_ratio": None}
# A stand-in for the optimizer, which only lends its learning rate to the log.
OPTIMIZER: Any = SimpleNamespace(param_groups=[{"lr": 1e-3}])


def labelled(batch: Batch, desirable: list[bool]) -> Batch:
    for example, label in zip(batch.examples, desirable, strict=True):
        example.columns["label"] = label
    return batch


def step(module: Any, parts: list[Batch]) -> float:
    """One optimizer step over microbatches, its update left out; the loss is the mean over all of their rows."""
    total = 0.0
    for part in parts:
        part.step_examples = float(sum(map(len, parts)))
        part.ref_logprobs = module.reference_logprobs(part)
        total += float(module.training_step(part, 0).detach())
    module.on_before_optimizer_step(OPTIMIZER)
    return total


@pytest.fixture
def naive(sums: Callable) -> Callable[[Any, Batch], list[float]]:
    @torch.no_grad()
    def rewards(module: Any, batch: Batch) -> list[float]:
        return (0.3 * (sums(module.policy, batch) - sums(module.reference.model, batch))).tolist()

    return rewards


@pytest.mark.parametrize("shift", ["midpoint", "running_mean"])
def test_loss_and_shift_are_those_of_the_formula(offline: Callable, batch_of: Callable, naive: Callable, shift) -> None:
    """-log sigmoid(+-(r - delta)); delta is 0 in the first step, then what the steps before it say."""
    module = offline(BCO, **(OPTIONS | {"shift": shift}))
    batch = labelled(batch_of([[3], [5], [2], [4]]), [True, True, True, False])
    rewards = naive(module, batch)
    good, bad = sum(rewards[:3]) / 3, rewards[3]
    delta = (good + bad) / 2 if shift == "midpoint" else sum(rewards) / 4
    for expected in (0.0, delta, delta):
        loss = step(module, [batch])
        terms = [math.log1p(math.exp(-s * (r - expected))) for s, r in zip([1, 1, 1, -1], rewards, strict=True)]
        assert loss == pytest.approx(sum(terms) / 4, rel=RTOL)
        assert module.meter.flush()["train/shift"] == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_the_shift_is_a_mean_over_all_steps_so_far(offline: Callable, batch_of: Callable, naive: Callable) -> None:
    module = offline(BCO, **OPTIONS)
    one, two = labelled(batch_of([[3], [5]]), [True, False]), labelled(batch_of([[4], [2], [6]]), [True, True, False])
    (a, b), (c, d, e) = naive(module, one), naive(module, two)
    step(module, [one])
    step(module, [two])
    assert float(module.shift_of(module.moments)) == pytest.approx(((a + c + d) / 3 + (b + e) / 2) / 2, rel=1e-4)


def test_the_cut_of_a_step_changes_neither_its_loss_nor_the_shift(offline: Callable, batch_of: Callable) -> None:
    outcomes = []
    for size in (4, 2, 1):
        torch.manual_seed(0)  # the same reference each time
        module, losses = offline(BCO, **OPTIONS), []
        for lengths, labels in (([[3], [5], [2], [4]], [1, 0, 0, 1]), ([[6], [1], [2], [3]], [1, 1, 1, 0])):
            module.trainer.accumulate_grad_batches = 4 // size
            parts = labelled(batch_of(lengths), [bool(label) for label in labels]).split(size)
            losses.append(step(module, parts) * size / 4)
        outcomes.append([*losses, float(module.shift_of(module.moments))])
    for other in outcomes[1:]:
        assert other == pytest.approx(outcomes[0], rel=RTOL)


def test_evaluation_does_not_move_the_shift(offline: Callable, batch_of: Callable) -> None:
    module, batch = offline(BCO, **OPTIONS), labelled(batch_of([[3], [5]]), [True, False])
    module.trainer.training = False
    batch.ref_logprobs = module.reference_logprobs(batch)
    module.training_step(batch, 0)
    assert not module._seen
    module.trainer.training = True
    step(module, [batch])
    assert [float(of_class.count) for of_class in module.moments] == [1, 1]


def test_the_moments_survive_a_checkpoint_bit_for_bit(offline: Callable, batch_of: Callable) -> None:
    module, batch = offline(BCO, **OPTIONS), labelled(batch_of([[3], [5], [2]]), [True, False, True])
    step(module, [batch])
    module.prompt_probs = {"ab": 0.1 + 0.2}
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    other = offline(BCO, **OPTIONS)
    other.on_load_checkpoint(checkpoint)
    assert other.prompt_probs == {"ab": 0.1 + 0.2}
    for one, two in zip(module.moments, other.moments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---- prompt weights --------------------------------------------------------------------------------------------------
def two_kinds(count: int = 12) -> list[Example]:
    """Prompts of tokens 3 to 9 come mostly with desirable answers, those of 30 to 36 mostly with others."""
    rng, rows = torch.Generator().manual_seed(0), []
    for i in range(count):
        first = 3 if i % 2 else 30
        prompt = torch.randint(first, first + 7, (4,), generator=rng).tolist()
        rows.append(Example(prompt, [[10, 2]], columns={"label": (i % 2 == 1) != (i % 6 == 0)}))
    return rows


def with_data(module: Any, train: list[Example], heldout: list[Example]) -> Any:
    module.trainer.datamodule = SimpleNamespace(train=train, heldout=heldout)
    module._prepare_weights()
    return module


@pytest.mark.parametrize("size", [1, 5])
def test_the_classifier_is_at_the_optimum_of_the_penalised_likelihood(offline: Callable, size: int) -> None:
    """scikit-learn's balanced, C=1 objective: sum_i c_i log loss_i + |w|^2 / 2; the logits that come out solve it."""
    rows = two_kinds()
    module = offline(BCO, **(OPTIONS | {"density_ratio": [0.5, 10.0], "microbatch_size": size}))
    with_data(module, rows, two_kinds(14)[12:])
    x = []
    for row in rows:
        with torch.no_grad():
            states = module.policy(torch.tensor([row.prompt_ids]), output_hidden_states=True).hidden_states
        x.append(states[-1][0].mean(0).double())
    features = torch.stack(x)
    probs = torch.tensor([module.prompt_probs[bco._prompt(row)] for row in rows], dtype=torch.float64)
    labels = torch.tensor([row.columns["label"] for row in rows]).double()
    balance = torch.where(labels.bool(), 12 / (2 * labels.sum()), 12 / (2 * (12 - labels.sum())))
    residual = balance * (labels - probs)
    # at the optimum the bias has no gradient and w = X^T residual, so the logits differ by X X^T residual
    assert float(residual.sum()) == pytest.approx(0, abs=1e-4)
    logits = torch.logit(probs)
    expected = features @ (features.T @ residual)
    torch.testing.assert_close(logits - logits[0], expected - expected[0], rtol=1e-3, atol=1e-3)
    assert len(module.prompt_probs) == 14


def test_undesirable_rows_weigh_by_their_prompt(offline: Callable, batch_of: Callable) -> None:
    """p = 0.8: 0.8 / 0.2 = 4; p = 0.1: 1/9, clipped to 0.5; a desirable row weighs 1."""
    module = offline(BCO, **(OPTIONS | {"density_ratio": [0.5, 10.0]}))
    batch = labelled(batch_of([[3], [5], [2]]), [True, False, False])
    module.prompt_probs = {bco._prompt(e): p for e, p in zip(batch.examples, [0.8, 0.8, 0.1], strict=True)}
    plain = offline(BCO, **OPTIONS)
    plain.reference = module.reference
    for row, weight in zip(range(3), (1.0, 4.0, 0.5), strict=True):
        alone = [batch.split(1)[row], batch.split(1)[row]]
        for one, part in zip((module, plain), alone, strict=True):
            part.ref_logprobs = one.reference_logprobs(part)
        losses = [float(one.training_step(part, 0).detach()) for one, part in zip((module, plain), alone, strict=True)]
        assert losses[0] == pytest.approx(weight * losses[1], rel=RTOL)
    metrics = module.meter.flush()
    assert metrics["train/udm_weight"] == pytest.approx((4 + 0.5) / 2)
    assert metrics["train/udm_accuracy"] == pytest.approx(2 / 3)  # 0.8 is right of the first, wrong of the second


def test_one_class_or_a_wrong_range_is_refused(offline: Callable) -> None:
    rows = [Example([3 + i], [[4]], columns={"label": True}) for i in range(3)]
    with pytest.raises(UserError, match=r"algorithm.density_ratio: .*both classes.* type algorithm.density_ratio=null"):
        with_data(offline(BCO, **(OPTIONS | {"density_ratio": [0.5, 10.0]})), rows, [])
    for wrong in ([0.5], [2.0, 1.0], [-1.0, 1.0]):
        with pytest.raises(UserError, match=r"type algorithm.density_ratio=\[0.5,10\]"):
            offline(BCO, **(OPTIONS | {"density_ratio": wrong}))
    module = with_data(offline(BCO, **OPTIONS), rows, [])
    assert not module.prompt_probs


def test_a_large_dataset_is_thinned_evenly() -> None:
    rows = [Example([i], [[4]], columns={"label": i % 2 == 0}) for i in range(20)]
    assert [row.prompt_ids for row in bco._spread_out(rows, True, 5)] == [[0], [4], [8], [12], [16]]
    assert len(bco._spread_out(rows, False, 1024)) == 10
