"""Tasks by name, without a question in common between train and held out, scored by the task's own function."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import reasoning_gym

from alignment.data.encode import encode
from alignment.data.reasoning_gym import ReasoningGym
from alignment.errors import UserError


def gym(**keys: Any) -> ReasoningGym:
    return ReasoningGym(**({"task": "chain_sum", "num_train": 20, "num_heldout": 8} | keys))


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_rows_are_different_questions_that_the_tasks_own_function_scores() -> None:
    train, held = gym(config={"max_terms": 3, "max_digits": 1}).load("prompts")
    assert (len(train), len(held)) == (20, 8)
    assert len(set(questions(train + held))) == 28
    score = reasoning_gym.create_dataset("chain_sum").score_answer
    for row in train + held:
        assert row["task"] == "chain_sum" and row["entry"]["question"] == row["prompt"][0]["content"]
        assert score(answer=row["answer"], entry=row["entry"]) == 1.0
        assert score(answer="nothing", entry=row["entry"]) < 1.0
        assert 2 <= row["entry"]["metadata"]["num_terms"] <= 3
        assert pickle.loads(pickle.dumps(row)) == row  # rewards may score in another process


def test_few_possible_questions_are_still_divided() -> None:
    """One-digit sums of two terms: questions repeat, and the repeats are left out."""
    keys = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held = gym(config=keys, num_train=100, num_heldout=40).load("prompts")
    assert len(set(questions(train))) == 100 and not set(questions(train)) & set(questions(held))


def test_held_out_rows_stay_when_more_are_trained_on() -> None:
    assert gym(num_train=40).load("prompts")[1] == gym().load("prompts")[1] == gym().load("prompts")[1]


def test_neighbouring_seeds_have_hardly_a_question_in_common() -> None:
    """In reasoning-gym itself, entry i of seed s is entry i - 1 of seed s + 1."""
    first, second = (questions(gym(seed=seed).load("prompts")[0]) for seed in (0, 1))
    assert len(set(first) & set(second)) <= 2
    plain = [reasoning_gym.create_dataset("chain_sum", size=9, seed=seed) for seed in (0, 1)]
    assert plain[0][1]["question"] == plain[1][0]["question"]


def test_demonstrations_and_pairs_are_checked_by_the_score() -> None:
    train, _ = gym().load("demonstrations")
    assert all(row["completion"] == [{"role": "assistant", "content": row["answer"]}] for row in train)
    score = reasoning_gym.create_dataset("chain_sum").score_answer
    for row in gym().load("pairs")[0]:
        assert score(answer=row["chosen"][0]["content"], entry=row["entry"]) == 1.0
        assert score(answer=row["rejected"][0]["content"], entry=row["entry"]) < 1.0


def test_unpaired_answers_are_a_right_and_a_wrong_row_per_question() -> None:
    pairs, rows = ([*gym().load(form)[0], *gym().load(form)[1]] for form in ("pairs", "unpaired"))
    assert [row["label"] for row in rows] == [True, False] * 28
    assert questions(rows[::2]) == questions(rows[1::2]) == questions(pairs)
    assert [row["completion"] for row in rows[::2]] == [pair["chosen"] for pair in pairs]
    assert [row["completion"] for row in rows[1::2]] == [pair["rejected"] for pair in pairs]


def test_a_ranked_list_falls_in_the_score_of_the_task() -> None:
    """countdown scores a wrong attempt above an answer of another form; chain_sum all wrong numbers alike."""
    for task in ("chain_sum", "countdown"):
        score = reasoning_gym.create_dataset(task).score_answer
        for row in gym(task=task).load("ranked")[0]:
            texts = [turns[0]["content"] for turns in row["completions"]]
            scores = [score(answer=text, entry=row["entry"]) for text in texts]
            assert len(set(texts)) == 3
            assert scores[0] == 1.0 > scores[1] >= scores[2]


def test_the_rows_encode_with_ids_that_repeat(in_bytes: Any) -> None:
    limits: dict[str, Any] = {"max_prompt_tokens": 999, "max_completion_tokens": 9}
    ids = []
    for _ in range(2):
        examples, _ = encode(gym(task="countdown").load("prompts")[0], "prompts", in_bytes(), **limits)
        ids.append([example.id for example in examples])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 20


@pytest.mark.parametrize(
    ("keys", "form", "words"),
    [
        ({"task": "chain_sun"}, "prompts", r"no 'chain_sun': type data.task=<one of chain_sum"),
        ({"task": "zzzzzzzz"}, "prompts", r"one of .*chain_sum.*zebra"),
        (
            {"config": {"max_term": 3}},
            "prompts",
            r"data.config.max_term: chain_sum has no such key: use one of .*max_terms",
        ),
        ({"config": {"seed": 3}}, "prompts", r"data.config.seed: follows from other keys"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "prompts", r"data.config: chain_sum refuses it \("),
        ({}, "stepwise", r"reasoning_gym has prompts, demonstrations, pairs, unpaired, ranked, not stepwise"),
        (
            {"num_train": 1, "num_heldout": 1},
            "ranked",
            r"1 other answer\(s\) of chain_sum is wrong for .*so it gives no ranked lists",
        ),
        (
            {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "num_train": 500},
            "prompts",
            r"data.num_train: chain_sum gave \d+ different questions in \d+ tries, 508 are wanted: type ",
        ),
    ],
)
def test_what_cannot_be_had_is_said(keys: dict[str, Any], form: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        gym(**keys).load(form)


def test_a_task_without_an_answer_of_its_own_gives_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, config = reasoning_gym.factory.DATASETS["chain_sum"]

    class Open(cls):
        """A task that shows no answer."""

        def __getitem__(self, index: int) -> dict[str, Any]:
            return cls.__getitem__(self, index) | {"answer": None}

    monkeypatch.setitem(reasoning_gym.factory.DATASETS, "chain_sum", (Open, config))
    assert gym().load("prompts")[0][0]["answer"] is None
    with pytest.raises(UserError, match=r"chain_sum has no answer of its own that it scores 1 .*prompts alone"):
        gym().load("demonstrations")


def test_a_task_with_one_answer_to_everything_gives_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, config = reasoning_gym.factory.DATASETS["chain_sum"]

    class Same(cls):
        """A task whose answers are all alike."""

        def __getitem__(self, index: int) -> dict[str, Any]:
            return cls.__getitem__(self, index) | {"answer": "yes"}

    monkeypatch.setitem(reasoning_gym.factory.DATASETS, "chain_sum", (Same, config))
    assert gym().load("demonstrations")[0][0]["completion"][0]["content"] == "yes"
    with pytest.raises(UserError, match=r"no other answer of chain_sum is wrong for .*so it gives no pairs"):
        gym().load("pairs")
