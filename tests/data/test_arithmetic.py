"""Problems, their right and wrong answers, and the division into train and held out."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.data.arithmetic import Arithmetic
from alignment.data.encode import encode
from alignment.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def parsed(row: dict[str, Any]) -> tuple[int, str, int]:
    match = re.fullmatch(r"What is (-?\d+) ([-+*]) (-?\d+)\? Reply with the number only\.", row["prompt"][0]["content"])
    assert match and row["prompt"][0]["role"] == "user"
    return int(match[1]), match[2], int(match[3])


@pytest.mark.parametrize(
    ("difficulty", "ops", "low", "high"), [(1, "+", 1, 9), (2, "+", 10, 50), (3, "*", 2, 12), (4, "+-*", 10, 99)]
)
def test_a_difficulty_is_all_its_problems_with_right_answers(difficulty: int, ops: str, low: int, high: int) -> None:
    train, held = Arithmetic(difficulty=difficulty, num_problems=30_000).load("prompts")
    problems = {parsed(row) for row in train + held}
    numbers = range(low, high + 1)
    assert problems == {(a, op, b) for op in ops for a in numbers for b in numbers}
    assert len(train) + len(held) == len(problems)
    assert all(int(row["answer"]) == OPS[op](a, b) for row in train + held for a, op, b in [parsed(row)])


def test_no_held_out_sum_is_trained_on_or_seen_mirrored() -> None:
    train, held = Arithmetic().load("prompts")
    assert (len(train), len(held)) == (61, 20)  # a quarter of 81
    assert not {frozenset((a, b)) for a, _, b in map(parsed, train)} & {
        frozenset((a, b)) for a, _, b in map(parsed, held)
    }


def test_a_difference_is_not_its_mirror() -> None:
    train, held = Arithmetic(operations=["-"], high=9, low=1, heldout=0.5).load("prompts")
    trained = set(map(parsed, train))
    assert any((b, "-", a) in trained for a, _, b in map(parsed, held))
    assert any(int(row["answer"]) < 0 for row in train)


def test_what_is_held_out_is_the_same_for_every_form_and_follows_the_seed() -> None:
    held = [{row["prompt"][0]["content"] for row in Arithmetic().load(form)[1]} for form in Arithmetic.forms]
    assert len(held) == 7 and all(questions == held[0] for questions in held)
    assert Arithmetic().load("prompts") == Arithmetic().load("prompts")
    assert Arithmetic(seed=1).load("prompts")[1] != Arithmetic().load("prompts")[1]


def test_a_pair_prefers_the_right_number_to_a_near_one() -> None:
    train, held = Arithmetic(operations=["+", "-"], low=0, high=9).load("pairs")
    distances = set()
    for row in train + held:
        a, op, b = parsed(row)
        right, wrong = (int(row[name][0]["content"]) for name in ("chosen", "rejected"))
        assert right == OPS[op](a, b) == int(row["answer"])
        assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"
        assert right < 0 or wrong >= 0
        distances.add(wrong - right)
    assert distances == {-3, -2, -1, 1, 2, 3}


def test_unpaired_answers_are_those_of_the_pair_as_two_rows() -> None:
    pairs, rows = ([*Arithmetic().load(form)[0], *Arithmetic().load(form)[1]] for form in ("pairs", "unpaired"))
    assert len(rows) == 2 * 81
    for pair, good, bad in zip(pairs, rows[::2], rows[1::2], strict=True):
        assert good == {name: pair[name] for name in ("prompt", "answer")} | {
            "completion": pair["chosen"],
            "label": True,
        }
        assert bad == good | {"completion": pair["rejected"], "label": False}


def test_a_ranked_list_is_right_then_off_by_one_then_off_by_more() -> None:
    train, held = Arithmetic(operations=["+", "-"], low=0, high=9).load("ranked")
    distances = set()
    for row in train + held:
        a, op, b = parsed(row)
        right, near, far = (int(turns[0]["content"]) for turns in row["completions"])
        assert all(turns[0]["role"] == "assistant" for turns in row["completions"])
        assert right == OPS[op](a, b) == int(row["answer"])
        assert right < 0 or min(near, far) >= 0
        distances.add((abs(near - right), abs(far - right)))
    assert distances == {(1, 2), (1, 3)}


def test_the_score_of_an_answer_falls_with_its_distance() -> None:
    for row in [*Arithmetic().load("scored")[0], *Arithmetic().load("scored")[1]]:
        off = abs(int(row["completion"][0]["content"]) - int(row["answer"]))
        assert row["score"] == {0: 1, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4}[off]


def test_of_two_solutions_one_slips_and_stays_wrong() -> None:
    train, held = Arithmetic().load("stepwise")
    assert len(train) + len(held) == 2 * 81
    seen = set()
    for good, bad in zip((train + held)[::2], (train + held)[1::2], strict=True):
        a, _, b = parsed(good)
        assert good["completions"] == [f"{a} + {b} = {a + b}", f"The answer is {a + b}."]
        assert good["labels"] == [True, True]
        right = [str(a + b) in step.replace(f"{a} + {b}", "").rstrip(".").split() for step in bad["completions"]]
        assert right == bad["labels"]
        assert bad["prompt"] == good["prompt"]
        seen.add(tuple(right))
    assert seen == {(False, False), (True, False)}


def test_demonstrations_say_the_answer() -> None:
    train, _ = Arithmetic().load("demonstrations")
    assert all(row["completion"] == [{"role": "assistant", "content": row["answer"]}] for row in train)


def test_of_a_range_too_large_to_list_problems_are_drawn() -> None:
    train, held = Arithmetic(low=10**6, high=10**7, num_problems=100, heldout=10).load("prompts")
    assert (len(train), len(held)) == (90, 10)
    assert len({parsed(row) for row in train + held}) == 100


def test_parts_of_a_difficulty_are_overridden_and_the_question_too() -> None:
    source = Arithmetic(difficulty=3, high=3, question="{a}{op}{b}=")
    assert {row["prompt"][0]["content"] for rows in source.load("prompts") for row in rows} == {
        "2*2=",
        "2*3=",
        "3*2=",
        "3*3=",
    }


@pytest.mark.parametrize(
    ("form", "num_examples", "num_completions"),
    [
        ("prompts", 61, 0),
        ("demonstrations", 61, 1),
        ("pairs", 61, 2),
        ("unpaired", 122, 1),
        ("ranked", 61, 3),
        ("scored", 122, 1),
        ("stepwise", 122, 1),
    ],
)
def test_the_rows_encode(in_bytes: Any, form: Any, num_examples: int, num_completions: int) -> None:
    rows, _ = Arithmetic().load(form)
    examples, report = encode(rows, form, in_bytes(), max_prompt_tokens=99, max_completion_tokens=40)
    assert len(examples) == num_examples and not report.dropped
    assert {len(example.completions) for example in examples} == {num_completions}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"difficulty": 9}, "data.difficulty: 9 is none of 1, 2, 3, 4"),
        ({"operations": ["/"]}, r"data.operations: '/' is none of \+ - \*"),
        ({"low": 5, "high": 4}, "data.low: 5 is above data.high=4"),
        ({"question": "sum?"}, "data.question: it must contain"),
        ({"question": "{a}, {b}", "operations": ["+", "-"]}, "data.question: it must contain"),
        ({"heldout": 81}, "data.heldout: 81 of 81 problems leaves none"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Arithmetic(**keys).load("prompts")


def test_other_forms_are_refused() -> None:
    words = "arithmetic has prompts, .*, ranked, scored, stepwise, not triples: type data=jsonl data.path"
    other: Any = "triples"
    with pytest.raises(UserError, match=words):
        Arithmetic().load(other)


@pytest.mark.parametrize("name", ["arithmetic", "reasoning_gym"])
def test_the_defaults_are_those_of_the_yaml(name: str) -> None:
    settings = yaml.safe_load((ROOT / "conf" / "data" / f"{name}.yaml").read_text())
    module, _, cls = settings.pop("_target_").rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    init = next(
        n for c in tree.body if getattr(c, "name", "") == cls for n in c.body if getattr(n, "name", "") == "__init__"
    )
    defaults = {a.arg: d and ast.unparse(d) for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults)}
    assert set(settings) == set(defaults)
    for key, value in settings.items():
        written = defaults[key]
        assert written is None or eval(written) in (value, None if value == {} else value), key


def test_every_argument_is_keyword_only() -> None:
    kinds = {p.kind for p in list(inspect.signature(Arithmetic).parameters.values())}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
