"""Extraction and comparison of answers; expected values are arithmetic, and the cases of public bug reports."""

import time
from fractions import Fraction

import pytest

from alignment.reward.answers import after, equal, extract, gold_answer, number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{5} is wrong, so \boxed{7}", "7"),
        (r"\boxed{840} ... \boxed{840}", "840"),  # not 840840
        (r"\fbox{42}", "42"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces do not count
        (r"\boxed{42} " + "and more " * 40, "42"),
        (r"\boxed{5", None),
        (r"\boxed{5} and then \boxed{7", None),  # the last one was cut off
        (r"\boxed{}", None),
        ("42", None),
    ],
)
def test_the_last_box_with_balanced_braces(text: str, answer: str | None) -> None:
    assert extract(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("#### 42" + "x" * 500, "42"),
        ("#### 42\n" + "word " * 100, "42"),
        ("#### 42 " + "and so on " * 50, "42"),
        ("#### 41\n#### 42", "42"),
        ("####$1,234.50", "$1,234.50"),
        ("42", None),
        ("####", None),
    ],
)
def test_what_follows_the_last_four_hashes(text: str, answer: str | None) -> None:
    assert extract(text, "hash") == answer


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("The answer is 12.", "12"),
        ("the answer is: 12", "12"),
        ("**Answer:** 12", "12"),
        ("The answer is 12 because 7 + 5 = 12.", "12"),
        ("The answer is 41? No. The answer is 42.", "42"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "0.5"),
        ("2 + 3 = 5", "5"),
        ("First 1 + 1 = 2.\nThen 2+3=5.", "5"),
        ("Half of it: \\boxed{21}\nso #### 42", "21"),  # a box comes first
        ("72 clips, altogether.", "72"),
    ],
)
def test_strict_takes_every_form_of_a_final_answer(text: str, gold: str) -> None:
    answer = extract(text, "strict")
    assert answer is not None
    assert equal(answer, gold)


@pytest.mark.parametrize(
    "text",
    [
        "it is 42, or 41",
        "The answer is 42, or 41",
        "The answer is 42, maybe 41.",
        "#### 42 or 41",
        "42 or 41",
        "42 or forty-one",
        "not 42",
        "42 million",
        "The answer is 42 times 3",
        "I get 42 here and go on",
        "42 = x, 41",
        "x >= 42",
        "42\nbut then 41",
        r"\boxed{42",
        "42x",
        "",
    ],
)
def test_strict_never_pays_for_a_number_in_passing(text: str) -> None:
    answer = extract(text, "strict")
    assert answer is None or not equal(answer, "42")


def test_last_number_is_flexible() -> None:
    assert extract("it is 42, or 41", "last_number") == "41"
    assert extract("so 5-3", "last_number") == "3"  # a minus between numbers is no sign
    assert extract("we get -3 apples", "last_number") == "-3"
    assert equal(extract("it costs $70,000.", "last_number") or "", "70000")
    assert extract("version v2", "last_number") is None


def test_whole_takes_the_text_alone() -> None:
    assert extract(" 12 \n", "whole") == "12"
    assert not equal(extract("The answer is 12", "whole") or "", "12")
    assert extract(" \n", "whole") is None


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="last_number"):
        extract("1", "flexible")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("70,000", 70000),
        ("$70,000.", 70000),
        (r"70{,}000", 70000),
        (r"70\,000", 70000),
        (r"\$70,\!000", 70000),
        ("1,234,567.89", Fraction(123456789, 100)),
        ("$29.00", 29),
        ("-$5", -5),
        ("$-5", -5),
        ("−5", -5),  # the typographic minus
        (r"\text{13}", 13),
        (r"5\text{ cm}", 5),
        ("5cm", 5),
        ("5 m^2", 5),
        ("72 clips, altogether.", 72),
        ("28%", 28),
        (r"28\%", 28),
        (r"90^\circ", 90),
        (r"\frac12", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("1/2", Fraction(1, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("2e3", 2000),
        (r"1.5 \times 10^{3}", 1500),
        (".5", Fraction(1, 2)),
        ("1.", 1),
        (r"$x = 12$", 12),
        (r"\(12\)", 12),
        ("**12.**", 12),
        ("`12`", 12),
        # no number
        ("1,2", None),
        ("12,34", None),
        ("1234,567", None),
        ("1.2.3", None),
        ("10:30", None),
        ("5x", None),
        ("5 x", None),
        (r"5\pi", None),
        ("5 - 3", None),
        ("5 million", None),
        ("3 apples and 2 pears", None),
        ("1/0", None),
        ("twelve", None),
        ("", None),
    ],
)
def test_the_value_of_a_number(text: str, value: Fraction | int | None) -> None:
    assert number(text) == value


def test_equality_of_numbers_is_exact_and_percent_is_dropped() -> None:
    assert equal("70000", "$70,000.")
    assert equal("0.5", r"\frac12")
    assert equal("28%", "28")
    assert not equal("28%", "0.28")
    assert not equal("0.333", "1/3")
    assert not equal("13", "thirteen")


def test_equality_of_text_ignores_spaces_case_and_wrapping() -> None:
    assert equal("Paris.", r"\text{paris}")
    assert equal("(C)", "c")
    assert equal(r"x + \dfrac{1}{y}", r"$x+\frac{1}{y}$")
    assert not equal("", "")
    assert not equal("Paris", "Rome")


def test_numbers_too_long_to_be_worth_computing_are_compared_as_text() -> None:
    assert equal("9" * 5000, "9" * 5000)
    assert number("9" * 5000) is None
    assert number("1e999999999") is None  # a power that would fill the memory


def test_the_answer_in_a_solution() -> None:
    assert gold_answer("7 * 6 = 42\n#### 42") == "42"
    assert gold_answer(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert gold_answer(" 42 ") == "42"
    assert gold_answer(" ") is None
    assert gold_answer(r"\boxed{4") is None


def test_after_the_reasoning() -> None:
    assert after("<think>41</think> 42", "</think>") == " 42"
    assert after("<think>41", "</think>") is None


@pytest.mark.parametrize(
    "text",
    [
        "1,",
        "9",
        "\\frac{",
        "\\boxed{",
        "{",
        "answer ",
        "answer is ",
        "\\text{",
        " ",
        "$",
        "= ",
        "1 ",
        "1/",
        "*",
        "\\,",
        "####",
    ],
)
def test_time_is_linear_in_the_text(text: str) -> None:
    """A policy writes what it likes: 40,000 characters of any of these took quadratic time in naive expressions."""
    long = text * (40_000 // len(text)) + "x"
    started = time.perf_counter()
    for form in ("strict", "boxed", "hash", "whole", "last_number"):
        equal(extract(long, form) or "", "12")
    assert time.perf_counter() - started < 2
