"""The process reward model's step against plain forwards of single rows, from rows encoded as in a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForTokenClassification

from alignment.algorithm.prm import PRM, step_labels, with_f1
from alignment.batch import Example, collate
from alignment.data.encode import encode
from alignment.model.tiny import Tiny

# Steps end where the mask says so; -: no step ends there. The third row has a single step.
ROWS = [
    Example([5, 6], [[7, 8, 3, 9, 3]], [[False, False, True, False, True]], {"labels": [True, False]}),
    Example([7], [[10, 11, 12, 3, 13, 3, 3]], [[False] * 3 + [True, False, True, True]], {"labels": [1, 1, 0]}),
    Example([14, 15, 16], [[17, 3]], [[False, True]], {"labels": [True]}),
    Example([18, 19], [[20, 3, 21, 3]], [[False, True, False, True]], {"labels": [False, False]}),
]
NUM_STEPS = 2 + 3 + 1 + 2


@pytest.fixture
def made(offline: Callable[..., Any]) -> Callable[..., Any]:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.num_labels, config.classifier_dropout = 2, 0.0  # pyright: ignore
    model = LlamaForTokenClassification(config)
    torch.nn.init.normal_(model.score.weight)

    def build(*, training: bool = True, solution_score: str = "min") -> Any:
        module = offline(PRM, solution_score=solution_score)
        module.policy, module.source = model, SimpleNamespace(shared_prompt="auto")
        module.trainer.training, module.trainer.validating = training, not training
        return module

    return build


@torch.no_grad()
def prob_good(model: Any) -> list[list[float]]:
    """P(good) of each step of each row, from its own forward."""
    probs = []
    for row in ROWS:
        assert row.loss_masks is not None
        logits = model(input_ids=torch.tensor([row.prompt_ids + row.completions[0]])).logits[0]
        at = [len(row.prompt_ids) + t for t, ends in enumerate(row.loss_masks[0]) if ends]
        probs.append(logits[at].softmax(-1)[:, 1].tolist())
    return probs


def test_labels_stand_at_the_ends_of_steps() -> None:
    labels = step_labels(collate(ROWS[:2]))
    assert labels.tolist() == [[-100, -100, 1, -100, 0, -100, -100], [-100, -100, -100, 1, -100, 1, 0]]


def test_rows_as_they_come_from_the_data(tmp_path: Any) -> None:
    """The labels are at the line break that ends each step, and follow a cut."""
    tokenizer = Tiny(path=str(tmp_path)).tokenizer
    row = {"prompt": "1+1+1?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]}
    for limit, said in ((99, [1, 0]), (11, [1])):
        batch = collate(encode([row], "stepwise", tokenizer, max_prompt_tokens=None, max_completion_tokens=limit)[0])
        labels = step_labels(batch)
        at = (labels[0] != -100).nonzero().flatten().tolist()
        assert [int(labels[0, i]) for i in at] == said
        assert all(tokenizer.decode([int(batch.completion_ids[0, i])]) == "\n" for i in at)


def test_the_loss_is_the_mean_over_steps(made: Callable[..., Any]) -> None:
    module = made()
    loss = module.training_step(collate(ROWS), 0)
    total = 0.0
    for row, probs in zip(ROWS, prob_good(module.policy), strict=True):
        total -= sum(math.log(p if good else 1 - p) for p, good in zip(probs, row.columns["labels"], strict=True))
    assert float(loss) == pytest.approx(total / NUM_STEPS, rel=1e-5)


def test_the_cut_into_microbatches_changes_nothing(made: Callable[..., Any]) -> None:
    module, grads, losses = made(), [], []
    for size in (4, 2, 1):
        module.trainer.accumulate_grad_batches = 4 // size
        module.zero_grad()
        for start in range(0, 4, size):
            batch = collate(ROWS[start : start + size])
            batch.step_tokens = float(NUM_STEPS)
            (module.training_step(batch, 0) / (4 // size)).backward()
        losses.append(module.meter.flush()["train/loss"])
        grads.append(torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None]))
    for other, loss in zip(grads[1:], losses[1:], strict=True):
        torch.testing.assert_close(other, grads[0], rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("kind", ["min", "prod", "last", "mean"])
def test_the_score_of_a_solution(made: Callable[..., Any], kind: str) -> None:
    module, batch = made(solution_score=kind), collate(ROWS)
    module.training_step(batch, 0)
    how = {"min": min, "prod": math.prod, "last": lambda p: p[-1], "mean": lambda p: sum(p) / len(p)}[kind]
    assert batch.rewards is not None
    want = [how(probs) for probs in prob_good(module.policy)]
    torch.testing.assert_close(batch.rewards, torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_what_an_evaluation_measures(made: Callable[..., Any]) -> None:
    module, logged = made(training=False), []
    module.source.tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [str(row) for row in ids])
    module.log_dict = lambda metrics, **_: logged.append(metrics)
    module.on_validation_start()
    with torch.no_grad():
        for i, rows in enumerate((ROWS[:3], ROWS[3:])):
            module.validation_step(collate(rows), i)
    module.on_validation_epoch_end()
    said = [
        (p > 0.5, bool(g)) for r, ps in zip(ROWS, prob_good(module.policy)) for p, g in zip(ps, r.columns["labels"])
    ]
    assert logged[0]["val/accuracy"] == pytest.approx(sum(s == g for s, g in said) / NUM_STEPS)
    for name, positive in (("good", True), ("bad", False)):
        hits = sum(s == g == positive for s, g in said)
        both = sum(s == positive for s, _ in said) + sum(g == positive for _, g in said)
        assert logged[0][f"val/f1_{name}"] == pytest.approx(2 * hits / both)
    assert not [name for name in logged[0] if "counts" in name]


def test_a_class_that_never_occurs_has_no_f1() -> None:
    counts = {"val/f1_counts/bad/hits": 0.0, "val/f1_counts/bad/predicted": 0.0, "val/f1_counts/bad/actual": 0.0}
    assert with_f1(counts | {"val/loss": 1.0}) == {"val/loss": 1.0}
