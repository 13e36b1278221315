"""Duplicates, contradictions and leaks, each made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.data.clean import clean
from alignment.data.messages import turn
from alignment.data.schema import Row
from alignment.errors import UserError

# Thirteen words, and fourteen that hold them.
SECRET = "one two three four five six seven eight nine ten eleven twelve thirteen"


def pair(prompt: Any, chosen: str = "yes", rejected: str = "no", **extra: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **extra}


def said(prompt: str, completion: str = "yes", **extra: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, **extra}


# ---- the same row twice --------------------------------------------------------------------------------------------
def test_a_row_that_equals_an_earlier_one_is_dropped_and_counted_whatever_its_other_columns() -> None:
    rows = [said("a", id=1), said("b"), said("a", id=2), said("a", "no"), said("a")]
    cleaned = clean(rows, [], "demonstrations")
    assert cleaned.rows == [rows[0], rows[1], rows[3]]
    assert cleaned.dropped == {"the same as an earlier row": 2}


@pytest.mark.parametrize(
    ("form", "row", "other"),
    [
        ("pairs", pair("a"), pair("a", "no", "yes")),
        ("demonstrations", said("a", tools=[{"name": "x"}]), said("a", tools=[{"name": "y"}])),
        ("unpaired", said("a", label=True), said("a", label=False)),
        ("ranked", {"prompt": "a", "completions": ["x", "y"]}, {"prompt": "a", "completions": ["y", "x"]}),
        (
            "stepwise",
            {"prompt": "a", "completions": ["x"], "labels": [True]},
            {"prompt": "a", "completions": ["x"], "labels": [False]},
        ),
        # What a prompt is scored by may be in any column.
        ("prompts", {"prompt": "a", "tests": "x"}, {"prompt": "a", "tests": "y"}),
        ("demonstrations", said("a"), {"prompt": turn("user", "a"), "completion": "yes"}),
    ],
)
def test_what_is_learned_from_must_be_equal(form: Any, row: dict[str, Any], other: dict[str, Any]) -> None:
    assert clean([row, other, row], [], form).rows == [row, other]


def test_copies_can_be_kept() -> None:
    rows = [said("a"), said("a")]
    cleaned = clean(rows, [], "demonstrations", duplicates="keep")
    assert cleaned.rows is rows
    assert not cleaned.dropped


def test_a_row_that_a_mixture_takes_again_stays_and_a_copy_from_elsewhere_goes() -> None:
    rows = []
    for where in ("a.jsonl:1", "a.jsonl:1", "a.jsonl:2"):
        rows.append(Row(said("a")))
        rows[-1].where = where
    cleaned = clean(rows, [], "demonstrations")
    assert [row.where for row in cleaned.rows] == ["a.jsonl:1", "a.jsonl:1"]  # pyright: ignore


# ---- contradictions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("form", "rows", "number"),
    [
        ("unpaired", [said("a", label=True), said("a", label=False), said("b", label=False)], 1),
        ("unpaired", [said("a", "x", label=True), said("a", "y", label=False)], 0),
        ("pairs", [pair("a", "x", "y"), pair("b", "x", "y"), pair("a", "y", "x"), pair("b", "y", "x")], 2),
        ("pairs", [pair("a", "x", "y"), pair("a", "x", "z"), pair("a", "x", "y")], 0),
        ("ranked", [{"prompt": "a", "completions": list(order)} for order in ("xyz", "xzy", "zyx")], 1),
        ("stepwise", [{"prompt": "a", "completions": ["x"], "labels": [label]} for label in (True, False)], 1),
        ("prompts", [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}], 1),
        ("prompts", [{"prompt": "a", "answer": "1", "id": 1}, {"prompt": "a", "answer": "1", "id": 2}], 0),
        ("demonstrations", [said("a", "x"), said("a", "y")], 0),
    ],
)
def test_questions_answered_in_two_ways_are_counted_and_kept(form: Any, rows: list[Any], number: int) -> None:
    cleaned = clean(rows, [], form, duplicates="keep")
    assert cleaned.num_conflicts == number
    assert cleaned.rows == rows
    assert bool(cleaned.conflict) == bool(number)


def test_the_first_contradiction_is_named() -> None:
    rows = [said("b", label=True), said("a", label=True), said("a", label=False)]
    assert clean(rows, [], "unpaired").conflict == "row 1 and row 2"


# ---- leaks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "leaks"),
    [
        ("What is 3 + 4?", True),
        ("  what IS\n3 +  4 ", True),
        ("“What is 3+4”...", True),
        ("What is 3 - 4?", False),
        ("What is 3 + 4.5?", False),
        ("What is 34?", False),
        ("What is 3 + 4 now?", False),
    ],
)
def test_a_prompt_that_is_held_out_but_for_case_space_and_punctuation_is_dropped(prompt: str, leaks: bool) -> None:
    rows = [said(prompt), said("another")]
    cleaned = clean(rows, [said("What is 3 + 4?", "7")], "demonstrations")
    assert cleaned.rows == rows[leaks:]
    assert cleaned.dropped == ({"the prompt is held out": 1} if leaks else {})


def test_messages_are_compared_by_what_is_said_and_the_system_turn_does_not_count() -> None:
    held = {"prompt": [*turn("system", "Be brief."), *turn("user", "Who?")], "completion": turn("assistant", "I.")}
    rows = [said("who"), said("be brief who")]
    assert clean(rows, [held], "demonstrations").rows == rows[1:]


@pytest.mark.parametrize(
    ("row", "held", "form"),
    [
        (said("q", f"it says {SECRET}."), said("h", SECRET), "demonstrations"),
        (said(f"read {SECRET.upper()}", "y"), said(f"{SECRET} and more"), "demonstrations"),
        (pair("q", "fine", SECRET), pair("h", SECRET, "no"), "pairs"),
        ({"prompt": f"so {SECRET}"}, {"prompt": "h", "answer": SECRET}, "prompts"),
        ({"prompt": "q", "completions": ["x", SECRET]}, {"prompt": SECRET, "completions": ["a", "b"]}, "ranked"),
        ({"prompt": "", "completion": SECRET}, {"prompt": "", "completion": f"so {SECRET}"}, "demonstrations"),
    ],
)
def test_thirteen_words_in_a_row_give_a_held_out_row_away(row: dict[str, Any], held: dict[str, Any], form: Any) -> None:
    others = [said(str(i)) | pair(str(i)) | {"completions": [str(i), "z"]} for i in range(10)]
    cleaned = clean([row, *others], [held], form)
    assert cleaned.rows == others
    assert cleaned.dropped == {"13 words in a row of a held-out row": 1}


def test_twelve_are_not_enough_unless_asked_for_and_words_of_two_texts_do_not_add_up() -> None:
    half = SECRET.partition(" seven")[0]
    rows = [said(half, SECRET.removeprefix(half)), said("q", SECRET.partition(" thirteen")[0])]
    held = [said("held", SECRET)]
    assert clean(rows, held, "demonstrations").rows == rows
    assert clean([rows[1], *map(said, "abcdefghij")], held, "demonstrations", ngram=12).dropped == {
        "12 words in a row of a held-out row": 1
    }


@pytest.mark.parametrize(("copies", "dropped"), [(10, 10), (11, 0)])
def test_what_more_than_ten_training_rows_say_is_no_leak(copies: int, dropped: int) -> None:
    rows = [said(f"q{i}", f"{i} {SECRET}") for i in range(copies)] + [said(f"x{i}") for i in range(100)]
    cleaned = clean(rows, [said("h", SECRET)], "demonstrations")
    assert cleaned.dropped.total() == dropped


def test_of_few_rows_what_more_than_a_tenth_say_is_no_leak() -> None:
    """A shared instruction does not empty a file of eight rows."""
    rows = [said(f"{SECRET}: {i}") for i in range(8)]
    assert clean(rows, [said(f"{SECRET}: 9")], "demonstrations").rows == rows


def test_a_leak_beside_what_many_say_is_found() -> None:
    rows = [said(f"{SECRET} {i}", str(i)) for i in range(50)]
    rows[7]["completion"] = "alpha " * 13
    held = [said(f"{SECRET} 99", "alpha " * 20)]
    cleaned = clean(rows, held, "demonstrations")
    assert cleaned.rows == rows[:7] + rows[8:]


def test_the_same_by_a_naive_search() -> None:
    """Every 3-gram of every pair of texts, over rows of few words, with many chunks' worth of rows."""
    words = [[str((i * j + i // 7) % 11) for j in range(1 + i % 9)] for i in range(450)]
    rows = [said(f"p {' '.join(text)}", f"c{i}") for i, text in enumerate(words)]
    rows[200:200] = [said("p u v w", "rare"), said("p 1 v w 1", "c"), said("p", "see u v w")]
    held = [said("q 7 3 10 6 2", "x"), said("q u v w", "x")]

    def grams(row: dict[str, Any]) -> set[tuple[str, ...]]:
        texts = [row[name].split() for name in ("prompt", "completion")]
        return {tuple(text[i : i + 3]) for text in texts for i in range(len(text) - 2)}

    known = set.union(*map(grams, held))
    times = {gram: sum(gram in grams(row) for row in rows) for gram in known}
    leaks = [row for row in rows if any(times[gram] <= 10 for gram in grams(row) & known)]
    assert leaks
    assert max(times.values()) > 10, "one of them is how these rows speak"
    cleaned = clean(rows, held, "demonstrations", ngram=3)
    assert cleaned.rows == [row for row in rows if row not in leaks]


def test_it_can_be_switched_off_in_whole_or_in_part() -> None:
    rows = [said("held"), said("q", SECRET), *map(said, "abcdefghij")]
    held = [said("held", SECRET)]
    assert clean(rows, held, "demonstrations", decontaminate=False).rows == rows
    assert clean(rows, held, "demonstrations", ngram=None).rows == rows[1:]
    assert clean(rows, held, "demonstrations").rows == rows[2:]


def test_nothing_left_and_no_ngram_are_errors() -> None:
    with pytest.raises(
        UserError, match=r"of 1 training rows none is left \(1 dropped: the prompt is held out\): type c"
    ):
        clean([said("h")], [said("H!")], "demonstrations")
    with pytest.raises(UserError, match=r"^cleaning\.ngram: 0 is no number of words: type cleaning\.ngram=13"):
        clean([said("h")], [], "demonstrations", ngram=0)


def test_no_rows_are_no_problem() -> None:
    assert clean([], [said("h")], "demonstrations").rows == []
