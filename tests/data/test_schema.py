"""Every format of docs/data.md in every form it can serve; expected rows are written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment.data.messages import RowProblem
from alignment.data.schema import FORMS, SERVES, Reading, check_rows, formats, normalise, recognise, shortened
from alignment.errors import UserError

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def bot(text: str) -> Row:
    return {"role": "assistant", "content": text}


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def one(row: Row, form: Any, **reading: Any) -> Row:
    rows = normalise(row, form, Reading(**reading))
    assert len(rows) == 1
    return rows[0]


HELLO = [user("hi"), bot("hello")]
LONG = [user("hi"), bot("hello"), user("and?"), bot("well")]

# (row, form, what it becomes)
CASES: list[tuple[str, Row, str, Row]] = [
    ("TRL prompt", {"prompt": "2+2="}, "prompts", {"prompt": "2+2="}),
    ("TRL chat prompt", {"prompt": [user("hi")]}, "prompts", {"prompt": [user("hi")]}),
    (
        "prompt, answer, extra",
        {"prompt": "2+2=", "answer": 4, "level": "easy"},
        "prompts",
        {"prompt": "2+2=", "answer": 4, "level": "easy"},
    ),
    ("GSM8K", {"question": "q", "answer": "so\n#### 4"}, "prompts", {"prompt": [user("q")], "answer": "so\n#### 4"}),
    (
        "MATH keeps the solution under its own name too",
        {"problem": "p", "solution": "s"},
        "prompts",
        {"prompt": [user("p")], "answer": "s", "solution": "s"},
    ),
    ("OpenRLHF label", {"prompt": "p", "label": "42"}, "prompts", {"prompt": "p", "answer": "42", "label": "42"}),
    (
        "verl",
        {"prompt": [user("q")], "reward_model": {"ground_truth": "7", "style": "rule"}},
        "prompts",
        {"prompt": [user("q")], "answer": "7", "reward_model": {"ground_truth": "7", "style": "rule"}},
    ),
    ("a null answer is none", {"prompt": "p", "answer": None}, "prompts", {"prompt": "p", "answer": None}),
    (
        "TRL prompt-completion",
        {"prompt": "The sky is", "completion": " blue."},
        "demonstrations",
        {"prompt": "The sky is", "completion": " blue."},
    ),
    (
        "in messages",
        {"prompt": [user("hi")], "completion": [bot("hello")]},
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("hello")]},
    ),
    (
        "one message by itself",
        {"prompt": user("hi"), "completion": bot("hello")},
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("hello")]},
    ),
    (
        "text and messages mixed",
        {"prompt": "hi", "completion": [bot("hello")]},
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("hello")]},
    ),
    (
        "and the other way round",
        {"prompt": [user("hi")], "completion": "hello"},
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("hello")]},
    ),
    ("a completion's prompt", {"prompt": "a", "completion": "b", "id": 3}, "prompts", {"prompt": "a", "id": 3}),
    ("messages", {"messages": HELLO}, "demonstrations", {"prompt": [user("hi")], "completion": [bot("hello")]}),
    ("messages, all turns", {"messages": LONG}, "demonstrations", {"prompt": LONG[:1], "completion": LONG[1:]}),
    ("messages as prompts", {"messages": LONG}, "prompts", {"prompt": LONG[:3]}),
    ("messages that end in a question", {"messages": LONG[:3]}, "prompts", {"prompt": LONG[:3]}),
    (
        "what follows the last reply teaches nothing",
        {"messages": LONG[:3]},
        "demonstrations",
        {"prompt": LONG[:1], "completion": LONG[1:2]},
    ),
    (
        "a prompt beside messages repeats them",
        {"prompt": "hi", "prompt_id": "x", "messages": HELLO},
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("hello")], "prompt_id": "x"},
    ),
    (
        "ShareGPT",
        {
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
            ]
        },
        "demonstrations",
        {"prompt": [system("be brief"), user("hi")], "completion": [bot("hello")]},
    ),
    (
        "ShareGPT with its system apart",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "s"},
        "demonstrations",
        {"prompt": [system("s"), user("hi")], "completion": [bot("yo")]},
    ),
    (
        "Alpaca",
        {"instruction": "Add", "input": "1 2", "output": "3"},
        "demonstrations",
        {"prompt": [user("Add\n\n1 2")], "completion": [bot("3")]},
    ),
    (
        "Alpaca without input",
        {"instruction": "Sing", "input": "", "output": "la"},
        "demonstrations",
        {"prompt": [user("Sing")], "completion": [bot("la")]},
    ),
    (
        "Alpaca with system and history",
        {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
        "demonstrations",
        {"prompt": [system("s"), user("a"), bot("b"), user("c")], "completion": [bot("d")]},
    ),
    (
        "Dolly",
        {"instruction": "Who?", "context": "It was me.", "response": "You.", "category": "qa"},
        "demonstrations",
        {"prompt": [user("Who?\n\nIt was me.")], "completion": [bot("You.")], "category": "qa"},
    ),
    ("text", {"text": "Once upon"}, "demonstrations", {"prompt": "", "completion": "Once upon"}),
    (
        "OpenAI's parts",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                bot("yo"),
            ]
        },
        "demonstrations",
        {"prompt": [user("hi")], "completion": [bot("yo")]},
    ),
    (
        "a tool call, with the nulls of Parquet",
        {
            "messages": [
                user("time?") | {"tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]},
                {"role": "tool", "content": "12:00", "name": "now"},
                bot("noon"),
            ],
            "tools": '[{"type": "function", "function": {"name": "now"}}]',
        },
        "demonstrations",
        {
            "prompt": [user("time?")],
            "completion": [
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]},
                {"role": "tool", "content": "12:00", "name": "now"},
                bot("noon"),
            ],
            "tools": [{"type": "function", "function": {"name": "now"}}],
        },
    ),
    (
        "TRL preference",
        {"prompt": "Sky?", "chosen": " blue", "rejected": " green", "margin": 2},
        "pairs",
        {"prompt": "Sky?", "chosen": " blue", "rejected": " green", "margin": 2},
    ),
    (
        "preference in messages",
        {"prompt": [user("q")], "chosen": [bot("a")], "rejected": [bot("b")]},
        "pairs",
        {"prompt": [user("q")], "chosen": [bot("a")], "rejected": [bot("b")]},
    ),
    (
        "implicit prompt in messages",
        {"chosen": LONG, "rejected": [*LONG[:3], bot("no")]},
        "pairs",
        {"prompt": LONG[:3], "chosen": [bot("well")], "rejected": [bot("no")]},
    ),
    (
        "one conversation is the beginning of the other",
        {"chosen": LONG, "rejected": LONG[:2]},
        "pairs",
        {"prompt": LONG[:1], "chosen": LONG[1:], "rejected": LONG[1:2]},
    ),
    (
        "implicit prompt in text: whole words",
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        "pairs",
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."},
    ),
    (
        "hh-rlhf: the prompt ends where the assistant begins, not where the answers part",
        {"chosen": "\n\nHuman: hi\n\nAssistant: I am well.", "rejected": "\n\nHuman: hi\n\nAssistant: I am ill."},
        "pairs",
        {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " I am well.", "rejected": " I am ill."},
    ),
    (
        "UltraFeedback: a prompt of text, and the whole conversation in chosen, rejected and messages",
        {"prompt": "hi", "messages": HELLO, "chosen": HELLO, "rejected": [user("hi"), bot("no")], "score_chosen": 7.5},
        "pairs",
        {
            "prompt": [user("hi")],
            "chosen": [bot("hello")],
            "rejected": [bot("no")],
            "messages": HELLO,
            "score_chosen": 7.5,
        },
    ),
    (
        "a conversation beside the pair that is one of its sides",
        {"messages": LONG, "chosen": LONG, "rejected": [*LONG[:3], bot("no")]},
        "pairs",
        {"prompt": LONG[:3], "chosen": [bot("well")], "rejected": [bot("no")]},
    ),
    (
        "chosen and rejected repeat the prompt's turns",
        {"prompt": LONG[:3], "chosen": LONG, "rejected": [*LONG[:3], bot("no")]},
        "pairs",
        {"prompt": LONG[:3], "chosen": [bot("well")], "rejected": [bot("no")]},
    ),
    (
        "LLaMA-Factory's ShareGPT preference",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "pairs",
        {"prompt": [user("q")], "chosen": [bot("a")], "rejected": [bot("b")]},
    ),
    (
        "Alpaca preference",
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        "pairs",
        {"prompt": [user("q")], "chosen": [bot("a")], "rejected": [bot("b")]},
    ),
    ("a pair's prompt", {"prompt": "p", "chosen": "a", "rejected": "b"}, "prompts", {"prompt": "p"}),
    (
        "a pair is a ranking",
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        "ranked",
        {"prompt": "p", "completions": ["a", "b"]},
    ),
    (
        "ranking, best first",
        {"prompt": "p", "completions": ["a", "b", "c"]},
        "ranked",
        {"prompt": "p", "completions": ["a", "b", "c"]},
    ),
    (
        "ranking by ranks",
        {"prompt": "p", "completions": ["a", "b", "c"], "ranks": [3, 1, 2]},
        "ranked",
        {"prompt": "p", "completions": ["b", "c", "a"]},
    ),
    (
        "ranking by scores",
        {"prompt": "p", "completions": ["a", "b", "c"], "scores": [0.1, -2, 7]},
        "ranked",
        {"prompt": "p", "completions": ["c", "a", "b"]},
    ),
    (
        "NeMo's ranking",
        {
            "context": [user("q")],
            "completions": [{"rank": 1, "completion": [bot("worse")]}, {"rank": 0, "completion": [bot("best")]}],
        },
        "ranked",
        {"prompt": [user("q")], "completions": [[bot("best")], [bot("worse")]]},
    ),
    (
        "a ranking of two is a pair",
        {"prompt": "p", "completions": ["a", "b"]},
        "pairs",
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ),
    (
        "TRL unpaired",
        {"prompt": "p", "completion": "c", "label": True},
        "unpaired",
        {"prompt": "p", "completion": "c", "label": True},
    ),
    (
        "labels as CSV has them",
        {"prompt": "p", "completion": "c", "label": "False"},
        "unpaired",
        {"prompt": "p", "completion": "c", "label": False},
    ),
    (
        "labels as numbers",
        {"prompt": "p", "completion": "c", "label": 0},
        "unpaired",
        {"prompt": "p", "completion": "c", "label": False},
    ),
    (
        "a labelled conversation",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "kto_tag": True},
        "unpaired",
        {"prompt": [user("q")], "completion": [bot("a")], "label": True},
    ),
    (
        "a scored completion",
        {"prompt": "p", "completion": "c", "rating": 4},
        "scored",
        {"prompt": "p", "completion": "c", "score": 4.0, "rating": 4},
    ),
    (
        "a score beside a label",
        {"prompt": "p", "completion": "c", "label": True, "score": 0.5},
        "scored",
        {"prompt": "p", "completion": "c", "score": 0.5},
    ),
    (
        "a score in a cell of text",
        {"prompt": "p", "completion": "c", "score": "4.5"},
        "scored",
        {"prompt": "p", "completion": "c", "score": 4.5},
    ),
    (
        "a label as a score",
        {"prompt": "p", "completion": "c", "label": False},
        "scored",
        {"prompt": "p", "completion": "c", "score": 0.0},
    ),
    (
        "a scored conversation: its last reply",
        {"messages": [user("q"), bot("a"), user("r"), bot("b")], "score": -1},
        "scored",
        {"prompt": [user("q"), bot("a"), user("r")], "completion": [bot("b")], "score": -1.0},
    ),
    ("an unpaired prompt", {"prompt": "p", "completion": "c", "label": True}, "prompts", {"prompt": "p"}),
    (
        "TRL stepwise",
        {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]},
        "stepwise",
        {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]},
    ),
    ("a ranking's prompt", {"prompt": "p", "completions": ["a", "b"], "id": 1}, "prompts", {"prompt": "p", "id": 1}),
    (
        "the steps' prompt",
        {"prompt": "p", "completions": ["a"], "labels": [0], "answer": "4"},
        "prompts",
        {"prompt": "p", "answer": "4"},
    ),
    (
        "steps of a question stay text",
        {"question": "q", "completions": ["one"], "labels": [1]},
        "stepwise",
        {"prompt": [user("q")], "completions": ["one"], "labels": [True]},
    ),
]


@pytest.mark.parametrize(("row", "form", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_row_becomes_the_form(row: Row, form: str, expected: Row) -> None:
    before = copy.deepcopy(row)
    assert one(row, form) == expected
    assert row == before


def test_every_format_and_form_is_among_the_cases() -> None:
    covered = {(recognise(row), form) for _, row, form, _ in CASES}
    # A pair as unpaired rows is tested below: it gives two.
    assert {(name, form) for name, forms in SERVES.items() for form in forms} - covered == {("preference", "unpaired")}


def test_a_pair_gives_a_good_and_a_bad_row() -> None:
    rows = normalise({"prompt": "p", "chosen": "a", "rejected": "b", "id": 1}, "unpaired")
    good, bad = {"completion": "a", "label": True}, {"completion": "b", "label": False}
    assert rows == [{"prompt": "p", "id": 1} | good, {"prompt": "p", "id": 1} | bad]


def test_columns_under_other_names() -> None:
    fields = {"prompt": "task.text", "answer": "gold"}
    row = {"task": {"text": "2+2="}, "gold": "4", "answer_old": 1}
    assert one(row, "prompts", fields=fields) == {"prompt": "2+2=", "answer": "4", "answer_old": 1, "task": row["task"]}


def test_the_chosen_alone_are_demonstrations_when_asked_for() -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert one(row, "demonstrations", fields={"completion": "chosen"}) == {
        "prompt": "p",
        "completion": "a",
        "rejected": "b",
    }
    row = {"chosen": HELLO, "rejected": [user("hi"), bot("no")]}
    assert one(row, "demonstrations", fields={"messages": "chosen"})["completion"] == [bot("hello")]


def test_text_becomes_turns_or_stays_text() -> None:
    plain, asked = {"prompt": "p", "completion": "c"}, {"question": "q", "response": "r"}
    assert one(plain, "demonstrations", chat=True) == {"prompt": [user("p")], "completion": [bot("c")]}
    assert one(asked, "demonstrations") == {"prompt": [user("q")], "completion": [bot("r")]}
    assert one(asked, "demonstrations", chat=False) == {"prompt": "q", "completion": "r"}
    assert one({"text": "t"}, "demonstrations", chat=True) == {"prompt": "", "completion": "t"}


def test_a_system_turn_is_added_where_there_is_none() -> None:
    assert one({"question": "q"}, "prompts", system="s")["prompt"] == [system("s"), user("q")]
    own = [system("own"), user("q")]
    assert one({"prompt": own}, "prompts", system="s")["prompt"] == own
    assert one({"messages": HELLO}, "demonstrations", system="s")["prompt"] == [system("s"), user("hi")]
    assert one({"prompt": "p"}, "prompts", system="s")["prompt"] == "p"


def test_the_last_turn_alone() -> None:
    assert one({"messages": LONG}, "demonstrations", turns="last") == {"prompt": LONG[:3], "completion": LONG[3:]}


def test_a_greeting_belongs_to_the_prompt_and_a_reply_in_two_messages_is_one() -> None:
    greeted = [bot("welcome"), user("hi"), bot("hello"), bot("there")]
    expected = {"prompt": greeted[:2], "completion": greeted[2:]}
    assert one({"messages": greeted}, "demonstrations") == expected
    assert one({"messages": greeted}, "demonstrations", turns="last") == expected


# (row, form, words of the message)
BAD: list[tuple[Row, str, tuple[str, ...]]] = [
    ({}, "prompts", ("prompt: missing", "no fields")),
    ({"promt": "x"}, "prompts", ("'promt' may be a slip for 'prompt'", "data.fields")),
    ({"prompt": ""}, "prompts", ("prompt: is empty",)),
    ({"prompt": 3}, "prompts", ("prompt: 3 is not text",)),
    ({"prompt": []}, "prompts", ("prompt: [] is no list of messages",)),
    ({"prompt": ["hi"]}, "prompts", ("prompt[0]: 'hi' is no message",)),
    ({"prompt": [{"content": "hi"}]}, "prompts", ("prompt[0].role: missing",)),
    ({"prompt": [{"role": "asistant", "content": "x"}]}, "prompts", ("prompt[0].role: 'asistant'", "assistant")),
    ({"prompt": [{"role": "user"}]}, "prompts", ("prompt[0].content: missing",)),
    ({"prompt": [{"role": "user", "content": 5}]}, "prompts", ("prompt[0].content: 5 is not text",)),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompts", ("prompt[0].content", "images")),
    ({"prompt": "p"}, "pairs", ("a prompt alone cannot serve as pairs", "chosen and rejected")),
    ({"prompt": "p", "answer": "4"}, "demonstrations", ("data.fields={completion: answer}",)),
    ({"prompt": "p", "chosen": "a"}, "pairs", ("rejected: missing beside chosen",)),
    ({"prompt": "p", "rejected": "a"}, "pairs", ("chosen: missing beside rejected",)),
    ({"prompt": "p", "chosen": "a", "rejected": None}, "pairs", ("rejected: missing beside chosen",)),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "pairs", ("rejected: is the same as chosen",)),
    ({"prompt": "p", "chosen": "a", "rejected": " "}, "pairs", ("rejected: is empty",)),
    ({"prompt": "p", "chosen": "a", "rejected": "b"}, "demonstrations", ("data.fields={completion: chosen}",)),
    ({"chosen": "apple", "rejected": "berry"}, "pairs", ("prompt: missing", "share no beginning")),
    ({"chosen": "the cat", "rejected": "the "}, "pairs", ("rejected: is nothing but the beginning",)),
    ({"chosen": [user("a"), bot("b")], "rejected": [user("c"), bot("d")]}, "pairs", ("share no first turn",)),
    (
        {"chosen": [user("a"), user("b")], "rejected": [user("a"), bot("c")]},
        "pairs",
        ("chosen[0].role", "begin with an assistant"),
    ),
    (
        {"prompt": "x", "chosen": HELLO, "rejected": [user("hi"), bot("n")]},
        "pairs",
        ("prompt: is not among the turns",),
    ),
    (
        {"prompt": [user("x")], "chosen": HELLO, "rejected": [user("hi"), bot("n")]},
        "pairs",
        ("neither begins with the prompt",),
    ),
    ({"completion": "c"}, "demonstrations", ("prompt: missing",)),
    ({"prompt": "p", "completion": [user("c")]}, "demonstrations", ("completion[0].role: 'user'",)),
    (
        {"prompt": "p", "completion": [bot("c"), user("d")]},
        "demonstrations",
        ("completion[1].role: 'user'", "end with"),
    ),
    ({"prompt": "p", "completion": [bot(" ")]}, "demonstrations", ("completion[0].content: is empty",)),
    ({"messages": [user("hi")]}, "demonstrations", ("messages: has no assistant's turn",)),
    ({"messages": [bot("hi")]}, "demonstrations", ("messages: has no assistant's turn after",)),
    (
        {"conversations": [{"from": "alien", "value": "x"}]},
        "demonstrations",
        ("conversations[0].from: 'alien'", "human"),
    ),
    ({"prompt": "p", "completions": ["a"]}, "ranked", ("completions: ['a'] is no list of two",)),
    ({"prompt": "p", "completions": ["a", "b", "a"]}, "ranked", ("completions[2]: comes twice",)),
    ({"prompt": "p", "completions": ["a", "b"], "scores": [1, 1]}, "ranked", ("scores: [1, 1] has ties",)),
    ({"prompt": "p", "completions": ["a", "b"], "ranks": [1]}, "ranked", ("ranks: [1] is no number for each of 2",)),
    ({"prompt": "p", "completions": ["a", "b", "c"]}, "pairs", ("a ranking of 3 completions cannot serve as pairs",)),
    (
        {"prompt": "p", "completions": ["a", "b"], "labels": [True]},
        "stepwise",
        ("labels: [True] is no label for each of 2",),
    ),
    ({"prompt": "p", "completions": ["a"], "labels": ["good"]}, "stepwise", ("labels[0]: 'good' is neither",)),
    ({"prompt": "p", "completions": ["a", ""], "labels": [1, 0]}, "stepwise", ("completions[1]: is empty",)),
    (
        {"prompt": "p", "completion": "c", "label": "good"},
        "unpaired",
        ("label: 'good' is neither true nor false",),
    ),
    (
        {"prompt": "p", "completion": "c", "label": False},
        "demonstrations",
        ("a completion and a label", "without the label"),
    ),
    ({"prompt": "p", "completion": "c"}, "scored", ("score: missing", "data.fields={score: <column>}")),
    ({"prompt": "p", "completion": "c", "score": "high"}, "scored", ("score: 'high' is no finite number",)),
    ({"prompt": "p", "completion": "c", "rating": True}, "scored", ("rating: True is no finite number",)),
    ({"prompt": "p", "completion": "c", "score": [1]}, "scored", ("score: [1] is no finite number",)),
    (
        {"prompt": "p", "chosen": "c", "rejected": "d", "score": 1},
        "scored",
        ("completion: missing", "score (a number)"),
    ),
    ({"prompt": [user("p")], "tools": "{"}, "prompts", ("tools: is not JSON",)),
    ({"prompt": [user("p")], "tools": ["now"]}, "prompts", ("tools: ['now'] is no list of tools",)),
    ({"text": "t"}, "prompts", ("text alone cannot serve as prompts", "evaluation.num_prompts=0")),
    ({"instruction": "i", "output": "o", "history": ["x"]}, "demonstrations", ("history: ['x'] is no list of rounds",)),
]


@pytest.mark.parametrize(("row", "form", "words"), BAD, ids=[f"{case[1]}-{case[2][0][:40]}" for case in BAD])
def test_a_bad_row_is_refused_with_its_field_and_what_to_do(row: Row, form: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(RowProblem) as caught:
        normalise(row, form)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.count(": ") >= 1


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(RowProblem, match=r"gold: there is no such column: data.fields.answer=<one of prompt, ans>"):
        normalise({"prompt": "p", "ans": 1}, "prompts", Reading({"answer": "gold"}))


def test_an_unknown_form_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no form 'chats': prompts, "):
        normalise({"prompt": "p"}, "chats")  # pyright: ignore


def found(*rows: Any) -> list[tuple[str, Any]]:
    return [(f"f.jsonl:{i}", row) for i, row in enumerate(rows, 1)]


def test_all_bad_rows_are_in_one_error_and_the_first_twenty_are_shown() -> None:
    rows = [{"prompt": "fine"}, *({"prompt": n} for n in range(25)), RowProblem("", "is not JSON", "mend it")]
    with pytest.raises(UserError) as caught:
        check_rows(found(*rows), "prompts")
    lines = str(caught.value).splitlines()
    assert lines[0] == "26 rows cannot be used as prompts:"
    assert lines[1] == "  - f.jsonl:2: prompt: 0 is not text: write text, or a list of messages"
    assert lines[20].startswith("  - f.jsonl:21:")
    assert lines[21:] == ["  - ... and 6 more", "Mend them, or go on without them: data.bad_rows=drop"]


def test_what_is_wrong_with_many_rows_is_said_once() -> None:
    with pytest.raises(UserError) as caught:
        check_rows(found(*({"prompt": ""} for _ in range(25)), {"prompt": 1}), "prompts")
    assert str(caught.value).splitlines()[1:-1] == [
        "  - f.jsonl:1, f.jsonl:2, f.jsonl:3 and 22 more: prompt: is empty: fill it in, or remove the row",
        "  - f.jsonl:26: prompt: 1 is not text: write text, or a list of messages",
    ]


def test_rows_of_one_problem_are_told_where_the_first_is_and_counted_as_rows() -> None:
    same = [f"f:{n}: prompt: is empty: fill it in" for n in (1, 2, 4, 5, 6)]
    others = [f"f:{n}: completion: is empty: fill it in" for n in (3, 7, 8)]
    assert shortened([*same[:2], others[0], *same[2:], *others[1:]]) == [
        "f:1, f:2, f:4 and 2 more: prompt: is empty: fill it in",
        *others,
    ]
    different = [f"f:{n}: n is {n}: mend it" for n in range(30)]
    assert shortened([*different, *same])[20:] == ["... and 15 more"]
    assert shortened([*same, *different])[20:] == ["... and 11 more"], "5 in the first line, 19 others, 11 of 35 not"


def test_dropped_rows_are_reported_and_the_others_know_where_they_are_from() -> None:
    rows, problems = check_rows(found({"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}), "prompts", bad_rows="drop")
    assert [(dict(row), row.where) for row in rows] == [({"prompt": "a"}, "f.jsonl:1"), ({"prompt": "b"}, "f.jsonl:3")]
    assert problems == ["f.jsonl:2: prompt: is empty: fill it in, or remove the row"]


def test_formats_are_counted() -> None:
    rows = found({"prompt": "a"}, {"messages": HELLO}, {"messages": HELLO}, {"x": 1}, RowProblem("", "a", "b"))
    assert formats(rows, Reading()) == {"prompt": 1, "messages": 2, "unknown": 1}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 2)
    | st.text("ab \n", max_size=5)
    | st.sampled_from(["user", "assistant", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "from", "value"]), inner)
    ),
    max_leaves=6,
)
NAMES = [
    "prompt",
    "question",
    "instruction",
    "input",
    "completion",
    "response",
    "output",
    "chosen",
    "rejected",
    "labels",
]
NAMES += ["completions", "label", "messages", "conversations", "text", "tools", "system", "history", "ranks", "scores"]
NAMES += ["answer", "reward_model", "context", "kto_tag"]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])  # a machine shared with others
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.sampled_from(FORMS))
def test_whatever_a_row_holds_it_serves_or_is_a_problem(row: Row, form: Any) -> None:
    """No other exception, and what serves has the form's fields, all text or all messages."""
    try:
        rows = normalise(row, form)
    except RowProblem:
        return
    names = {
        "prompts": [],
        "pairs": ["chosen", "rejected"],
        "demonstrations": ["completion"],
        "unpaired": ["completion"],
    }
    for result in rows:
        contents = [
            result["prompt"],
            *(result[name] for name in names.get(form, [])),
            *(result["completions"] if form == "ranked" else []),
        ]
        assert len({isinstance(content, list) for content in contents}) == 1
