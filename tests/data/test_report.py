"""What the data report says of examples whose numbers are known by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from alignment.batch import Example
from alignment.data.report import Lengths, as_text, data_report, pitfalls, shown_example, survey


def pair(chosen: int, rejected: int, prompt: int = 3, **columns: Any) -> Example:
    """A pair with completions of these lengths."""
    return Example(list(range(prompt)), [[7] * chosen, [8] * rejected], None, columns)


def summary(examples: int, **changes: Any) -> dict[str, Any]:
    """What `encode` reports of rows of which nothing was cut or dropped."""
    counts = {"rows": examples, "examples": examples, "dropped": {}, "conflicts": 0, "cut_prompts": 0}
    quantiles = {"prompt_tokens": {"p95": 600}, "completion_tokens": {"p95": 700}}
    return counts | quantiles | {"form": "pairs", "cut_completions": 0} | changes


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_quantiles_are_lengths_that_occur() -> None:
    # 1 .. 20 in order: places 0, int(.05 * 19) = 0, int(.5 * 19) = 9, int(.95 * 19) = 18, 19; mean 10.5
    assert Lengths(range(20, 0, -1)).quantiles() == {
        "min": 1, "p05": 1, "median": 10, "p95": 19, "max": 20, "mean": 10.5,
    }  # fmt: skip
    assert Lengths([5, 5, 5, 900]).quantiles()["median"] == 5
    assert Lengths().quantiles() == {}


def test_bins_hold_every_length_once() -> None:
    # 119 // 40 + 1 = 3 wide, 119 // 3 + 1 = 40 bins
    assert Lengths(range(120)).histogram() == {"width": 3, "counts": [3] * 40}
    assert Lengths([0, 2, 2]).histogram() == {"width": 1, "counts": [1, 0, 2]}
    assert Lengths().histogram() == {"width": 1, "counts": [0]}


def test_pairs_are_counted() -> None:
    examples = [pair(2, 1), pair(5, 1), pair(1, 4), pair(3, 3), pair(2, 1)]
    found = survey(examples, "pairs")
    assert (found["examples"], found["loss_tokens"], found["duplicates"]) == (5, 3 + 6 + 5 + 6 + 3, 1)
    assert (found["chosen_longer"], found["chosen_shorter"]) == (3 / 5, 1 / 5)
    assert found["tokens"]["chosen"]["mean"] == 13 / 5
    assert found["tokens"]["rejected"]["max"] == 4
    assert found["histogram"]["chosen"] == {"width": 1, "counts": [0, 1, 2, 1, 0, 1]}


def test_only_tokens_that_count_are_loss_tokens() -> None:
    example = Example([1], [[5, 6, 7]], [[False, True, True]])
    assert survey([example], "demonstrations")["loss_tokens"] == 2


def test_labels_of_completions_and_of_steps() -> None:
    unpaired = [Example([1], [[2]], None, {"label": label}) for label in (True, True, False)]
    assert survey(unpaired, "unpaired")["labels"] == {"true": 2, "false": 1}
    steps = [Example([1], [[2]], None, {"labels": [True, False]}), Example([1], [[2]], None, {"labels": [False]})]
    assert survey(steps, "stepwise")["labels"] == {"true": 1, "false": 2}
    assert "labels" not in survey([Example([1], [], None, {"label": "4"})], "prompts")


def test_where_rows_are_from() -> None:
    examples = [pair(1, 2, source="a"), pair(1, 2, source="b"), pair(1, 2, source="a", subset="x"), pair(1, 2)]
    assert survey(examples, "pairs")["sources"] == {"a": 2, "b": 1}


def test_ten_thousand_rows_take_less_than_a_second() -> None:
    examples = [pair(100 + i % 50, 100, 200) for i in range(10_000)]
    started = time.process_time()
    survey(examples, "pairs")
    assert time.process_time() - started < 1


# ---- warnings --------------------------------------------------------------------------------------------------------
def train(**changes: Any) -> dict[str, Any]:
    return summary(100) | survey([pair(2, 2)] * 100, "pairs") | {"duplicates": 0} | changes


HELD = {"heldout": {"examples": 100}}


def test_nothing_is_said_of_ordinary_data() -> None:
    assert pitfalls("pairs", {"train": train(), **HELD}) == []


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("pairs", {"cut_completions": 11}, "6% of the completions are cut, a cut one learns no end: encoding.max_com"),
        ("pairs", {"cut_prompts": 6}, "6% of the prompts are cut, what is asked may be gone: encoding.max_prompt_tok"),
        (
            "pairs",
            {"rows": 120, "dropped": {"the same as an earlier row": 20}},
            "17% of the rows repeat earlier ones, ",
        ),
        ("pairs", {"duplicates": 11}, "11% of the rows repeat earlier ones, 11 of them are still there"),
        ("pairs", {"conflicts": 2}, "2% of the questions are answered in two ways"),
        ("pairs", {"chosen_longer": 0.7}, "in 70% of the pairs the chosen answer is the longer one (means of 2 and 2"),
        ("pairs", {"chosen_shorter": 0.9}, "in 90% of the pairs the chosen answer is the shorter one"),
        (
            "unpaired",
            {"labels": {"true": 80, "false": 20}},
            "80 completions are desirable and 20 are not: KTO weighs them ",
        ),
        ("unpaired", {"labels": {"true": 10, "false": 90}}, "with algorithm.desirable_weight=9"),
        ("unpaired", {"labels": {"true": 100}}, "all 100 labels are true"),
    ],
)
def test_a_pitfall_is_told_with_what_to_do(form: str, changes: dict[str, Any], words: str) -> None:
    (said,) = pitfalls(form, {"train": train(**changes), **HELD})
    assert words in said


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("pairs", {"cut_completions": 10, "cut_prompts": 5}),  # 5 % of 200 and of 100
        ("pairs", {"duplicates": 10, "conflicts": 1}),
        ("pairs", {"chosen_longer": 0.69}),
        ("pairs", {"chosen_longer": 1.0, "examples": 49}),
        ("unpaired", {"labels": {"true": 79, "false": 20}}),
        ("demonstrations", {"labels": {"true": 100}, "chosen_longer": 1.0}),
    ],
)
def test_below_its_threshold_nothing_is_said(form: str, changes: dict[str, Any]) -> None:
    assert pitfalls(form, {"train": train(**changes), **HELD}) == []


def test_few_or_no_held_out_examples_are_told() -> None:
    assert "nothing is held out" in pitfalls("pairs", {"train": train()})[0]
    (said,) = pitfalls("pairs", {"train": train(), "heldout": {"examples": 16}})
    assert said.startswith("16 heldout examples are few")
    assert "0.12" in said  # 0.5 / sqrt(16) = 0.125


def test_the_report_is_numbers_and_text() -> None:
    examples = [pair(2, 1), pair(4, 1)]
    dropped = {"two completions are the same tokens": 3}
    report = data_report({"train": examples}, {"train": summary(2, rows=5, dropped=dropped)})
    assert report["sets"]["train"]["identical_pairs"] == 3
    lines = as_text(report).splitlines()
    assert lines[0] == "train: 2 examples of 5 rows"
    assert "  dropped: 3 (two completions are the same tokens)" in lines
    assert "  chosen tokens: min 2, p05 2, median 2, p95 2, max 4, mean 3.0" in lines
    assert "  chosen: longer in 100.0%, shorter in 0.0% of the pairs; identical pairs: 3" in lines
    assert lines[-2:] == ["look at:", f"  - {report['warnings'][0]}"]


# ---- one example -----------------------------------------------------------------------------------------------------
def test_an_example_is_shown_with_its_mask(toy: Callable[..., Any]) -> None:
    """a 3, b 4, EOS 2: the first completion is learned but for its first token."""
    example = Example([3, 4], [[4, 3, 2], [3, 2]], [[False, True, True], [True, True]])
    plain = shown_example(example, "pairs", toy(), colour=False)
    assert plain.splitlines() == [
        "prompt (2 tokens, none learned):",
        "a b",  # this tokenizer has no decoder: its tokens are joined by spaces
        "chosen (3 tokens, 2 learned):",
        "b[[a </s>]]",
        "rejected (2 tokens, 2 learned):",
        "[[a </s>]]",
    ]
    colour = shown_example(example, "pairs", toy(), colour=True).splitlines()
    assert colour[1] == "\033[2ma b\033[0m"
    assert colour[3] == "\033[2mb\033[0m\033[32ma </s>\033[0m"


def test_data_cannot_take_hold_of_the_terminal(in_bytes: Callable[..., Any]) -> None:
    tokenizer = in_bytes()
    ids = tokenizer("\x1b[31mred\n")["input_ids"]
    shown = shown_example(Example(ids, []), "prompts", tokenizer, colour=True)
    assert "\\x1b[31mred\n" in shown
    assert "\x1b[31m" not in shown
