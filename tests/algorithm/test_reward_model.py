"""Reward models' steps against plain transformers forwards: losses, options, microbatches, what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from alignment.algorithm.meter import Meter
from alignment.algorithm.reward_model import RewardModel
from alignment.algorithm.reward_model_ranked import RewardModelRanked
from alignment.algorithm.reward_model_scored import RewardModelScored
from alignment.algorithm.scoring import finished, numbers
from alignment.batch import Batch, Example, collate
from alignment.errors import UserError

PLAIN: dict[str, Any] = {
    "center_coef": 0.0,
    "label_smoothing": 0.0,
    "margin_column": None,
    "prob_chosen_column": None,
}
# Ragged pairs; the longer side alternates.
PAIRS = [
    Example([5, 6, 7], [[8, 9, 2], [10, 2]], columns={"margin": 0.5, "p": 0.9}),
    Example([11], [[12, 2], [13, 14, 15, 2]], columns={"margin": 0.0, "p": 0.5}),
    Example([16, 17, 18, 19, 20], [[21, 2], [22]], columns={"margin": 1.0, "p": 1.0}),
    Example([23, 24], [[25, 26, 27, 2], [28, 2]], columns={"margin": 0.2, "p": 0.0}),
]


@pytest.fixture
def classifier() -> LlamaForSequenceClassification:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    return model


@pytest.fixture
def made(offline: Callable[..., Any], classifier: LlamaForSequenceClassification) -> Callable[..., Any]:
    def build(kind: type = RewardModel, *, training: bool = True, **options: Any) -> Any:
        module = offline(kind, **((PLAIN if kind is RewardModel else {}) | options))
        module.policy = classifier
        module.source = SimpleNamespace(shared_prompt="auto")
        module.trainer.training = training
        module.trainer.validating = not training
        return module

    return build


def naive(model: Any, rows: list[Example]) -> Tensor:
    """Score of every completion by the model's own forward, one unpadded row at a time."""
    ids = [torch.tensor([row.prompt_ids + completion]) for row in rows for completion in row.completions]
    return torch.cat([model(input_ids=row).logits.view(1) for row in ids])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"center_coef": 0.1},
        {"label_smoothing": 0.2},
        {"margin_column": "margin"},
        {"prob_chosen_column": "p"},
        {"prob_chosen_column": "p", "margin_column": "margin", "center_coef": 0.01},
    ],
    ids=str,
)
def test_the_loss_of_pairs(made: Callable[..., Any], classifier: Any, options: dict[str, Any]) -> None:
    """-p log s(d) - (1 - p) log s(-d) + c (r_w + r_l)^2, d = r_w - r_l - margin, written out with floats."""
    loss = made(**options).training_step(collate(PAIRS), 0)
    scores, total = naive(classifier, PAIRS).tolist(), 0.0
    for i, row in enumerate(PAIRS):
        chosen, rejected = scores[2 * i], scores[2 * i + 1]
        gap = chosen - rejected - (row.columns["margin"] if "margin_column" in options else 0.0)
        p = row.columns["p"] if "prob_chosen_column" in options else 1 - options.get("label_smoothing", 0.0)
        total += -p * math.log(sigmoid(gap)) - (1 - p) * math.log(sigmoid(-gap))
        total += options.get("center_coef", 0.0) * (chosen + rejected) ** 2
    assert float(loss) == pytest.approx(total / 4, rel=1e-4)  # float32 sums in another order


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["pairs", "plackett_luce", "all_pairs"])
def test_the_cut_into_microbatches_changes_nothing(made: Callable[..., Any], kind: str, size: int) -> None:
    rows, options = PAIRS, {"center_coef": 0.1}
    module = made(**options) if kind == "pairs" else made(RewardModelRanked, loss=kind, **options)
    grads, losses = [], []
    for count in (4, size):
        module.trainer.accumulate_grad_batches = 4 // count
        module.zero_grad()
        for start in range(0, 4, count):
            batch = collate(rows[start : start + count])
            batch.step_examples = 4.0
            (module.training_step(batch, 0) / (4 // count)).backward()
        losses.append(module.meter.flush()["train/loss"])
        grads.append(torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_two_ranked_completions_are_a_pair(made: Callable[..., Any]) -> None:
    pair = made(center_coef=0.1).training_step(collate(PAIRS), 0)
    for loss in ("plackett_luce", "all_pairs"):
        both = made(RewardModelRanked, loss=loss, center_coef=0.1).training_step(collate(PAIRS), 0)
        torch.testing.assert_close(both, pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["plackett_luce", "all_pairs"])
def test_the_loss_of_lists(made: Callable[..., Any], classifier: Any, loss: str) -> None:
    rows = [Example([5, 6], [[8, 2], [9, 10, 2], [11, 2], [12]]), Example([7], [[8, 9, 2], [10, 2], [3, 2], [4, 2]])]
    got = made(RewardModelRanked, loss=loss, center_coef=0.0).training_step(collate(rows), 0)
    total = 0.0
    for s in naive(classifier, rows).view(2, 4).tolist():
        if loss == "plackett_luce":  # one after the other, each the best of those left
            total += sum(-s[k] + math.log(sum(math.exp(x) for x in s[k:])) for k in range(3))
        else:
            total += sum(-math.log(sigmoid(s[i] - s[j])) for i in range(4) for j in range(i + 1, 4)) / 6
    assert float(got) == pytest.approx(total / 2, rel=1e-4)


def test_the_loss_of_scored_completions(made: Callable[..., Any], classifier: Any) -> None:
    rows = [Example(r.prompt_ids, r.completions[:1], columns={"score": n}) for r, n in zip(PAIRS, [4, -1.5, 0, 1])]
    module = made(RewardModelScored)
    loss = module.training_step(collate(rows), 0)
    gaps = [s - row.columns["score"] for s, row in zip(naive(classifier, rows).tolist(), rows, strict=True)]
    assert float(loss) == pytest.approx(sum(gap**2 for gap in gaps) / 4, rel=1e-5)
    assert module.meter.flush()["train/absolute_error"] == pytest.approx(sum(map(abs, gaps)) / 4, rel=1e-5)
    module.trainer.accumulate_grad_batches, total = 4, 0.0
    for row in rows:
        batch = collate([row])
        batch.step_examples = 4.0
        total += float(module.training_step(batch, 0)) / 4
    assert total == pytest.approx(float(loss), rel=1e-5)


def test_what_an_evaluation_measures(made: Callable[..., Any], classifier: Any) -> None:
    """Over the whole held-out set, whatever its batches: mean and spread of all scores, calibration, accuracy."""
    module, logged = made(training=False), []
    module.source.tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [str(row) for row in ids])
    module.log_dict = lambda metrics, **_: logged.append(metrics)
    module.on_validation_start()
    batches = [collate(PAIRS[:3]), collate(PAIRS[3:])]
    with torch.no_grad():
        for i, batch in enumerate(batches):
            module.validation_step(batch, i)
        scores = naive(classifier, PAIRS)
    module.on_validation_epoch_end()
    (metrics,) = logged
    gaps = (scores[::2] - scores[1::2]).tolist()
    right = [float(gap > 0) for gap in gaps]
    assert metrics["val/accuracy"] == sum(right) / 4
    assert metrics["val/rewards/mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert metrics["val/rewards/std"] == pytest.approx(float(scores.std(correction=0)), rel=1e-4)
    assert metrics["val/margin"] == pytest.approx(sum(gaps) / 4, abs=1e-5)
    bins: dict[int, list[float]] = {}
    for gap, hit in zip(gaps, right, strict=True):
        confidence = sigmoid(abs(gap))
        bins.setdefault(int((confidence - 0.5) * 20), []).append(hit - confidence)
    assert metrics["val/calibration_error"] == pytest.approx(sum(abs(sum(v)) for v in bins.values()) / 4, abs=1e-5)
    assert not [name for name in metrics if "square" in name or "calibration/" in name]
    torch.testing.assert_close(batches[1].rewards, scores[6:], rtol=1e-5, atol=1e-6)
    assert batches[1].texts == ["[25, 26, 27, 2]", "[28, 2]"]


def test_sums_become_metrics_only_where_they_are(made: Callable[..., Any]) -> None:
    assert finished({"train/loss": 1.0}) == {"train/loss": 1.0}
    assert finished({"train/rewards/mean": 1e4, "train/rewards/square": 1e8 - 1.0})["train/rewards/std"] == 0.0
    module = made()
    module.meter = Meter()
    module.log_calibration(torch.tensor([1.0]))  # of a training batch it would say nothing
    assert module.meter.flush() == {}


@pytest.mark.parametrize("value", [None, "0.5", True, math.nan, math.inf, 1.5, -0.1])
def test_a_row_without_its_number_is_named(value: Any) -> None:
    rows = [PAIRS[0], Example([1], [[2], [3]], columns={"p": value, "prompt": "Which is best?"}, id="row-7")]
    with pytest.raises(UserError, match=r"column 'p' of row row-7 \(Which is best\?\) .* algorithm\.soft=<"):
        numbers(rows, "p", "soft", share=True)
    if value in (1.5, -0.1):
        assert numbers(rows, "p", "margin_column") == [0.9, value]


def test_all_rows_are_looked_at_before_the_first_step(made: Callable[..., Any]) -> None:
    module = made(margin_column="gap")
    module.trainer.datamodule = SimpleNamespace(train=PAIRS)
    with pytest.raises(UserError, match="column 'gap' of row"):
        module.on_fit_start()


def test_two_ways_to_soften_a_label_are_refused(made: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"algorithm\.label_smoothing: .*type algorithm\.label_smoothing=0"):
        made(label_smoothing=0.1, prob_chosen_column="p")


def test_no_reference_is_built(made: Callable[..., Any], classifier: Any) -> None:
    module = made()
    built = []
    module.source = SimpleNamespace(scorer=lambda labels, per_token: built.append((labels, per_token)) or classifier)
    module.policy = None
    module.configure_model()
    assert built == [(1, False)]
    assert not module.needs_reference
    assert not module.samples


def test_an_empty_reference_is_no_part_of_the_batch(made: Callable[..., Any]) -> None:
    batch: Batch = collate(PAIRS)
    made().training_step(batch, 0)
    assert batch.ref_logprobs is None
    assert batch.rewards is not None
    assert not batch.rewards.requires_grad
