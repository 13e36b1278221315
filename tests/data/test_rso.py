"""Rejection sampling of scored samples into pairs: frequencies, what is no pair, and which rows are refused."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.data.rso import RSO, accept
from alignment.errors import UserError
from alignment.losses.selection import acceptance

ROW = {"prompt": "p", "completions": ["a", "b", "c", "d"], "scores": [1.0, 0.0, 0.5, 0.25], "topic": "x"}


def source(path: Path, rows: list[dict[str, Any]], **options: Any) -> RSO:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RSO(**({"path": str(path), "heldout": None, "beta": 0.5, "num_accepted": 8} | options))


def pairs_of(rows: RSO) -> list[dict[str, Any]]:
    return list(rows.load("pairs")[0])


# ---- acceptance ------------------------------------------------------------------------------------------------------
def test_the_accepted_are_distributed_as_policy_times_exp_of_score() -> None:
    """200 samples of three outcomes, 8 accepted: q e^(r / 0.5) = 0.6, 0.3 e, 0.1 e^2, of which the sum is 2.154.

    The first round accepts about 58 of the 200, so that 8 never need a second one. 8,000 draws: +-0.0055 each.
    """
    rng, found = random.Random(0), Counter()
    for _ in range(1000):
        drawn = rng.choices([("x", 0.0), ("y", 0.5), ("z", 1.0)], [0.6, 0.3, 0.1], k=200)
        found.update(name for name, _ in accept(drawn, beta=0.5, count=8, rng=rng))
    weights = {"x": 0.6, "y": 0.3 * math.e, "z": 0.1 * math.e**2}
    for name, weight in weights.items():
        assert found[name] / 8000 == pytest.approx(weight / sum(weights.values()), abs=0.025)


def test_one_of_two_by_hand() -> None:
    """The worse one is accepted first if it comes first (1/2) and is accepted (e^-1): 0.184. 20,000 draws: +-0.0027."""
    rng = random.Random(0)
    worse = sum(accept([("a", 1.0), ("b", 0.5)], beta=0.5, count=1, rng=rng)[0][0] == "b" for _ in range(20_000))
    assert worse / 20_000 == pytest.approx(0.5 * math.exp(-1), abs=0.011)


def test_the_probabilities_are_those_of_the_loss_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round whose draws lie just under and just over each probability."""
    scores = [1.0, 0.0, 0.5, 0.25]
    expected = acceptance(torch.tensor([scores], dtype=torch.float64), beta=0.5)[0].tolist()
    for factor, num_first in ((0.999999, 4), (1.000001, 0)):
        rng = random.Random(0)
        monkeypatch.setattr(rng, "shuffle", lambda items: None)
        draws = iter([factor * p for p in expected])
        monkeypatch.setattr(rng, "random", lambda draws=draws: next(draws, 0.0))
        first = accept(list(zip("abcd", scores, strict=True)), beta=0.5, count=4, rng=rng)
        assert len(first) == 4
        assert len(list(draws)) == 0
        # all in the first round, or none in it and all in the next, whose draws are 0
        assert [name for name, _ in first] == list("abcd"), num_first


def test_beta_to_nothing_is_the_best_and_a_large_one_takes_all() -> None:
    rng = random.Random(1)
    samples = [(str(i), float(i)) for i in range(10)]
    assert {name for name, _ in accept(samples, beta=1e-3, count=3, rng=rng)} == {"9", "8", "7"}
    seen = Counter(name for _ in range(400) for name, _ in accept(samples, beta=1e6, count=3, rng=rng))
    assert all(60 < seen[name] < 180 for name, _ in samples)  # 120 each
    assert len(accept(samples, beta=0.5, count=50, rng=rng)) == 10


# ---- pairs -----------------------------------------------------------------------------------------------------------
def test_pairs_keep_the_row_and_choose_by_score(tmp_path: Path) -> None:
    pairs = source(tmp_path / "a.jsonl", [ROW]).pairs(ROW)
    assert len(pairs) == 2  # four samples, all accepted in the end
    score = dict(zip(ROW["completions"], ROW["scores"], strict=True))
    for pair in pairs:
        assert score[pair["chosen"]] > score[pair["rejected"]]
        assert {key: pair[key] for key in ("prompt", "topic")} == {"prompt": "p", "topic": "x"}
        assert not {"completions", "scores"} & pair.keys()


def test_equal_scores_equal_texts_and_samples_without_a_score_make_no_pair(tmp_path: Path) -> None:
    make = source(tmp_path / "a.jsonl", [ROW]).pairs
    assert make({"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 1, 1]}) == []
    assert make({"prompt": "p", "completions": ["a", "a"], "scores": [1, 0]}) == []
    assert make({"prompt": "p", "completions": ["a", "b"], "scores": [1, None]}) == []
    pairs = make({"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, None, 0]})
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("a", "c")]


def test_what_is_drawn_depends_on_the_row_and_the_seed_alone(tmp_path: Path) -> None:
    rows = [ROW | {"prompt": f"p{i}", "completions": [f"{i}{j}" for j in range(4)]} for i in range(30)]
    options = {"num_accepted": 2}
    whole = pairs_of(source(tmp_path / "a.jsonl", rows, **options))
    turned = pairs_of(source(tmp_path / "b.jsonl", rows[::-2], **options))
    assert whole == pairs_of(source(tmp_path / "c.jsonl", rows, **options))
    assert turned
    assert all(row in whole for row in turned)
    assert whole != pairs_of(source(tmp_path / "d.jsonl", rows, seed=1, **options))


def test_prepared_rows_are_not_taken_for_those_of_another_draw(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    settings = (
        {},
        {"beta": 0.1},
        {"num_accepted": 2},
        {"seed": 1},
        {"fields": {"scores": "scores", "completions": "c"}},
    )
    prints = [source(path, [ROW], **changed).fingerprint("pairs") for changed in settings]
    assert len(set(prints)) == len(prints)
    assert source(path, [ROW]).fingerprint("pairs") == prints[0]


def test_held_out_prompts_are_whole_and_prompts_come_once(tmp_path: Path) -> None:
    rows = [ROW | {"prompt": f"p{i}"} for i in range(20)]
    train, heldout = source(tmp_path / "a.jsonl", rows, heldout=0.25).load("pairs")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert len(train) + len(heldout) == 40
    prompts = source(tmp_path / "b.jsonl", rows, heldout=None).load("prompts")[0]
    assert [row["prompt"] for row in prompts] == [f"p{i}" for i in range(20)]


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    row = {"question": "q?", "answers": ["a", "b"], "reward": [0, 1]}
    fields = {"completions": "answers", "scores": "reward", "prompt": "question"}
    (pair,) = source(tmp_path / "a.jsonl", [row], fields=fields).load("pairs")[0]
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("q?", "b", "a")


# ---- refused ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "completions"),
        ({"prompt": "p", "completions": ["a"], "scores": [1]}, "completions"),
        ({"prompt": "p", "completions": ["a", "b"]}, "scores"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1]}, "scores"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1, "2"]}, "scores"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1, True]}, "scores"),
        ({"completions": ["a", "b"], "scores": [1, 0]}, "prompt"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError, match=f"a.jsonl.*{field}"):
        source(path, [ROW, row]).load("pairs")
    (problem,) = RSO.problems("pairs", path=str(path), beta=0.5, num_accepted=8)
    assert "a.jsonl" in problem
    assert field in problem
    assert len(source(path, [ROW, row], bad_rows="drop").load("pairs")[0]) == 2


@pytest.mark.parametrize(("key", "value"), [("beta", 0.0), ("num_accepted", 1)])
def test_a_number_that_cannot_work_is_refused(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"data\.{key}: .*type data\.{key}="):
        source(tmp_path / "a.jsonl", [ROW], **{key: value})
    keys = {"path": str(tmp_path / "a.jsonl"), "beta": 0.5, "num_accepted": 8} | {key: value}
    (problem,) = RSO.problems("pairs", **keys)
    assert problem.startswith(f"data.{key}: ")


def test_all_ties_leave_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row to train on"):
        source(tmp_path / "a.jsonl", [ROW | {"scores": [1, 1, 1, 1]}]).load("pairs")
