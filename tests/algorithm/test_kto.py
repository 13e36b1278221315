"""KTO's mismatched pairs and z0 against naive loops, its loss by hand, what it logs, and the warning about balance."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from alignment.algorithm.kto import KTO, kl_pairs
from alignment.batch import Batch, Example, collate
from alignment.errors import UserError

RTOL = 1e-5
OPTIONS: dict[str, Any] = {"beta": 0.3, "loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.5}


def rows(prompts: list[list[int]]) -> list[Example]:
    """One example per prompt; example i has the completion [10 + i, 2], desirable if i is even."""
    return [Example(p, [[10 + i, 2]], columns={"label": i % 2 == 0}) for i, p in enumerate(prompts)]


def given(pairs: list[Example]) -> list[int]:
    """Which example's completion each prompt got."""
    return [pair.completions[0][0] - 10 for pair in pairs]


def labelled(batch: Batch, desirable: list[bool]) -> Batch:
    for example, label in zip(batch.examples, desirable, strict=True):
        example.columns["label"] = label
    return batch


# ---- mismatched pairs ------------------------------------------------------------------------------------------------
def test_every_prompt_gets_the_completion_of_another_and_every_completion_comes_once() -> None:
    prompts = [[1, 5], [1, 5], [7], [8, 9, 3], [7], [4, 4]]
    pairs = kl_pairs(rows(prompts))
    assert [pair.prompt_ids for pair in pairs] == prompts
    assert sorted(given(pairs)) == list(range(6))
    assert all(prompts[i] != prompts[other] for i, other in enumerate(given(pairs)))


def test_with_different_prompts_the_pairs_are_one_rotation() -> None:
    """Following who gets whose completion leads through all rows and back: a rotation by one, in some order."""
    partner = given(kl_pairs(rows([[3 + i] for i in range(7)])))
    seen, row = [], 0
    for _ in partner:
        seen.append(row)
        row = partner[row]
    assert row == 0 and sorted(seen) == list(range(7))


def test_the_pairs_do_not_depend_on_the_order_of_the_rows() -> None:
    examples = rows([[3, i // 2] for i in range(8)])
    shuffled = [examples[i] for i in (5, 2, 7, 0, 1, 6, 3, 4)]
    one, other = (
        {(tuple(e.prompt_ids), e.completions[0][0]): p.completions for e, p in zip(part, kl_pairs(part), strict=True)}
        for part in (examples, shuffled)
    )
    assert one == other


def test_a_pair_is_never_longer_than_the_longest_example() -> None:
    """Longest: 6 + 2. With the 5-token completion, the 6-token prompt keeps its BOS and its last 2 tokens: 3 + 5."""
    long, short = Example([1, 11, 12, 13, 14, 15], [[20, 2]]), Example([1, 3], [[30, 31, 32, 33, 2]])
    pairs = kl_pairs([long, short], bos=1)
    assert (pairs[0].prompt_ids, pairs[0].completions) == ([1, 14, 15], short.completions)
    assert (pairs[1].prompt_ids, pairs[1].completions) == ([1, 3], long.completions)


def test_a_pair_learns_what_its_completion_did() -> None:
    one, other = Example([1], [[5, 6]], [[False, True]]), Example([2], [[7]])
    assert [pair.loss_masks for pair in kl_pairs([one, other])] == [None, [[False, True]]]


def test_rows_that_cannot_be_mismatched_are_refused() -> None:
    assert kl_pairs([]) == []
    for prompts in ([[3]], [[3], [3], [4]]):
        with pytest.raises(UserError, match=r"data: KTO's KL needs completions of other prompts"):
            kl_pairs(rows(prompts))


# ---- z0 --------------------------------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 5])
def test_z0_is_the_mean_log_ratio_of_all_pairs(offline: Callable, batch_of: Callable, sums: Callable, size) -> None:
    module = offline(KTO, **OPTIONS, microbatch_size=size)
    examples = batch_of([[3], [5], [2], [4], [6]]).examples
    whole = collate(examples)
    mean = (sums(module.policy, whole) - sums(module.reference.model, whole)).mean()
    assert abs(mean) > 0.01
    found = module.kl_estimate(examples)
    torch.testing.assert_close(found, mean.clamp(min=0), rtol=RTOL, atol=1e-6)
    module.policy, module.reference.model = module.reference.model, module.policy
    torch.testing.assert_close(module.kl_estimate(examples), (-mean).clamp(min=0), rtol=RTOL, atol=1e-6)


def test_z0_is_measured_once_per_step_and_without_gradient(
    offline: Callable, batch_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = offline(KTO, **OPTIONS), labelled(batch_of([[3], [5], [2], [4]]), [True, False, True, True])
    steps = SimpleNamespace(stream=SimpleNamespace(take=lambda start, count: [(start + i) % 4 for i in range(count)]))
    monkeypatch.setattr(L.Trainer, "train_dataloader", SimpleNamespace(dataset=steps))
    module.trainer.datamodule = SimpleNamespace(train=batch.examples, heldout=[])
    module.source.tokenizer = SimpleNamespace(bos_token_id=None)
    calls: list[int] = []
    estimate = module.kl_estimate
    module.kl_estimate = lambda pairs: calls.append(len(pairs)) or estimate(pairs)
    for part in batch.split(2):
        part.ref_logprobs = module.reference_logprobs(part)
        module.training_step(part, 0).backward()
    assert calls == [4]
    assert not module._kl[1].requires_grad


# ---- the loss --------------------------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_loss_and_metrics_are_those_of_the_formula(offline: Callable, batch_of: Callable, sums: Callable, loss) -> None:
    """Desirable w (1 - sigmoid(beta (x - z0))), undesirable with the sign turned; z0 = 0.4, or 0 for APO-zero."""
    module, batch = offline(KTO, **(OPTIONS | {"loss": loss})), labelled(batch_of([[3], [5], [2]]), [True, False, True])
    module._kl = (0, torch.tensor(0.4))
    batch.ref_logprobs = module.reference_logprobs(batch)
    value = float(module.training_step(batch, 0))
    metrics = module.meter.flush()
    z0 = 0.4 if loss == "kto" else 0.0
    ratios = (sums(module.policy, batch) - sums(module.reference.model, batch)).tolist()
    signs, weights = [1, -1, 1], [1.0, 1.5, 1.0]
    terms = [w * (1 - 1 / (1 + math.exp(-s * 0.3 * (x - z0)))) for w, s, x in zip(weights, signs, ratios, strict=True)]
    assert value == pytest.approx(sum(terms) / 3, rel=RTOL)
    assert metrics["train/loss"] == pytest.approx(sum(terms) / 3, rel=RTOL)
    assert metrics["train/rewards/chosen"] == pytest.approx(0.3 * (ratios[0] + ratios[2]) / 2, rel=1e-4)
    assert metrics["train/rewards/rejected"] == pytest.approx(0.3 * ratios[1], rel=1e-4)
    policy = sums(module.policy, batch).tolist()
    assert metrics["train/logps/chosen"] == pytest.approx((policy[0] + policy[2]) / 2, rel=RTOL)
    assert metrics["train/logps/rejected"] == pytest.approx(policy[1], rel=RTOL)
    assert (metrics["train/num_chosen"], metrics["train/num_rejected"]) == (2, 1)
    assert metrics.get("train/z0") == (pytest.approx(0.4) if loss == "kto" else None)


def test_the_margin_is_the_difference_of_the_class_means(offline: Callable, batch_of: Callable) -> None:
    """Two microbatches of 3:1 and 1:0 labels: a mean of their margins would be another number, or NaN."""
    module, logged = offline(KTO, **OPTIONS), []
    module.log_dict = lambda metrics, **_: logged.append(dict(metrics))
    module._kl = (0, torch.tensor(0.0))
    batches = [labelled(batch_of([[3], [5], [2], [4]]), [True, True, False, True]), labelled(batch_of([[6]]), [True])]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for batch in batches:
        batch.ref_logprobs = module.reference_logprobs(batch)
        module.training_step(batch, 0)
        policy, reference, desirable = module.sums(batch)
        for reward, label in zip((0.3 * (policy - reference)).tolist(), desirable.tolist(), strict=True):
            rewards[label].append(reward)
    module.log_step()
    expected = sum(rewards[True]) / 4 - rewards[False][0]
    assert logged[-1]["train/rewards/margins"] == pytest.approx(expected, rel=1e-4)
    batches[1].ref_logprobs = module.reference_logprobs(batches[1])
    module.training_step(batches[1], 0)
    module.log_step()
    assert "train/rewards/chosen" in logged[-1]
    assert not {"train/rewards/margins", "train/rewards/rejected"} & logged[-1].keys()
    assert all(value == value for value in logged[-1].values())


# ---- balance ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("labels", "weights", "words"),
    [
        # n_D = 300, n_U = 100: lambda_D in [1/3, 1.33/3] or lambda_U in [3/1.33, 3]
        ([300, 100], (1.0, 1.0), ["weigh 3 to 1", "<0.3333 to 0.4433>", "<2.256 to 3>"]),
        ([100, 300], (1.0, 1.0), ["weigh 0.333 to 1", "<3 to 3.99>", "<0.2506 to 0.3333>"]),
        ([300, 100], (0.4, 1.0), []),
        ([100, 100], (1.0, 1.0), []),
        ([5, 0], (1.0, 1.0), ["all 5 rows are desirable"]),
        ([0, 5], (1.0, 1.0), ["all 5 rows are undesirable"]),
    ],
)
def test_weights_that_leave_the_classes_unbalanced_are_told(
    offline: Callable, caplog: pytest.LogCaptureFixture, labels, weights, words
) -> None:
    module = offline(KTO, **(OPTIONS | {"desirable_weight": weights[0], "undesirable_weight": weights[1]}))
    examples = [Example([3], [[4]], columns={"label": label}) for label in [True] * labels[0] + [False] * labels[1]]
    module.trainer.datamodule = SimpleNamespace(train=examples, heldout=[])
    with caplog.at_level(logging.WARNING, "alignment"):
        module.on_train_start()
    told = [record.getMessage() for record in caplog.records if record.name == "alignment"]
    assert len(told) == bool(words)
    assert all(word in told[0] for word in words)
