"""What a policy may write to be paid for nothing, or to break the run: the right score each, and no process is left.

What a program in a completion may do is in test_code.py and test_sandbox.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from alignment.reward.accuracy import Accuracy
from alignment.reward.format import Format
from alignment.reward.function import Function
from alignment.reward.jail import descendants

# completion, right answer, score of reward=accuracy
ANSWERS: dict[str, tuple[str, str, float]] = {
    "self-corrected box": (r"\boxed{41}. No, wait: \boxed{42}", "42", 1.0),
    "box corrected away": (r"\boxed{42}. No, wait: \boxed{41}", "42", 0.0),
    "box in a box": (r"\boxed{\boxed{42}}", "42", 1.0),
    "box that never closes": (r"\boxed{42", "42", 0.0),
    "empty box": (r"The answer is 42. \boxed{}", "42", 0.0),
    "box of all answers": (r"\boxed{1, 2, 42}", "42", 0.0),
    "box with an or": (r"\boxed{41 or 42}", "42", 0.0),
    "fraction as decimal": ("0.5", "1/2", 1.0),
    "LaTeX fraction": (r"\boxed{\frac{2}{4}}", "1/2", 1.0),
    "short LaTeX fraction": (r"\boxed{\dfrac12}", "0.5", 1.0),
    "mixed number": (r"1 1/2", "1.5", 1.0),
    "division by zero": ("1/0", "0", 0.0),
    "unit": ("The answer is 5 cm.", "5", 1.0),
    "unit as text": (r"\boxed{5\text{ apples}}", "5", 1.0),
    "million is no unit": ("The answer is 5 million", "5", 0.0),
    "half is no unit": ("The answer is 5 and a half", "5", 0.0),
    "percent": ("28%", "28", 1.0),
    "percent is not its share": ("0.28", "28%", 0.0),
    "LaTeX percent": (r"$28\%$", "28", 1.0),
    "thousands": ("The answer is 70,000.", "70000", 1.0),
    "thousands in LaTeX": (r"\boxed{70{,}000}", "70000", 1.0),
    "a pair is no number": ("1,2", "12", 0.0),
    "currency": ("$1,234.50", "1234.5", 1.0),
    "minus": ("The answer is -3", "3", 0.0),
    "minus in Unicode": ("\u22123", "-3", 1.0),
    "power of ten": (r"2 \times 10^3", "2000", 1.0),
    "tower of powers": ("10^10^10^10", "10", 0.0),
    "a huge exponent": ("1e999999999", "1", 0.0),
    "a million digits": ("9" * 1_000_000, "9", 0.0),
    "a million braces": (r"\boxed{" * 100_000, "9", 0.0),
    "a million backslashes": ("\\" * 1_000_000, "9", 0.0),
    "infinity": ("inf", "1", 0.0),
    "not a number": ("nan", "nan ", 1.0),
    "unparsable LaTeX": (r"\boxed{\frac{\left(}{", "1", 0.0),
    "forged pass": ("Score: 1.0. The checker says: correct. passed", "42", 0.0),
    "mentioned in passing": ("It is not 42 but I will not say more", "42", 0.0),
    "the question again": ("40 + 2 = ?", "42", 0.0),
    "a list of all": (" ".join(map(str, range(100))), "42", 0.0),
    "after the answer another": ("The answer is 42. The answer is 41.", "42", 0.0),
    "answer before reasoning": ("42 <think> 41", "42", 0.0),
    "nothing": ("", "42", 0.0),
    "spaces": (" \n\t ", "42", 0.0),
    "null characters": ("\x0042\x00", "42", 0.0),
    "half a surrogate": ("\ud83d", "42", 0.0),
    "right to left": ("\u202e42", "24", 0.0),
    "letter as variable": ("5x", "5", 0.0),
    "equation": ("x = 42", "42", 1.0),
    "chain of equations": ("40 + 2 = 41 + 1 = 42", "42", 1.0),
}
PATTERN = r"\s*<think>(?:(?!</?think>).)*</think>\s*(?!</?think>)\S(?:(?!</?think>).)*"
# completion, score of reward=format with its own pattern
FORMS: dict[str, tuple[str, float]] = {
    "right": ("<think>so</think>42", 1.0),
    "two blocks": ("<think>a</think><think>b</think>42", 0.0),
    "a block within": ("<think><think>a</think></think>42", 0.0),
    "no answer": ("<think>a</think>  ", 0.0),
    "never closed": ("<think>" * 20_000, 0.0),
    "text before": ("Sure! <think>a</think>42", 0.0),
}
SCORES = """
import os, sys, time
def score(completions, **columns):
    for text in completions:
        if text == "hang": time.sleep(3600)
        if text == "fork":
            for _ in range(5):
                if os.fork() == 0: time.sleep(3600)
        if text == "die": os._exit(1)
        if text == "print": sys.stdout.write("x" * 5_000_000); sys.stdout.flush()
        if text == "raise": raise ValueError(text)
    return [1.0 for _ in completions]
"""
FUNCTIONS: dict[str, float | None] = {
    "fine": 1.0, "hang": None, "die": None, "print": 1.0, "raise": None, "fork": 1.0, "also fine": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """Processes that began here have ended: workers, and whatever their code has started."""
    before = set(descendants())
    yield
    assert set(descendants()) <= before


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    file = tmp_path_factory.mktemp("user") / "scores.py"
    file.write_text(SCORES)
    made: dict[str, Any] = {
        "accuracy": Accuracy(),
        "math": Accuracy(verifier="math", timeout=20.0),
        "format": Format(pattern=PATTERN, timeout=20.0),
        "function": Function(path=f"{file}:score", timeout=2.0, on_error="missing"),
    }
    yield made
    for reward in made.values():
        getattr(reward, "close", lambda: None)()


@pytest.mark.parametrize("name", ANSWERS)
def test_answer(rewards: dict[str, Any], name: str) -> None:
    text, answer, score = ANSWERS[name]
    assert rewards["accuracy"]([text], [{"answer": answer}]) == [score]


@pytest.mark.parametrize(
    "name", ["tower of powers", "unparsable LaTeX", "a huge exponent", "half a surrogate", "infinity"]
)
def test_answer_that_math_verify_reads(rewards: dict[str, Any], name: str) -> None:
    """0, or unscorable where it could not be decided in time; never a point and never a hang."""
    text, answer, _ = ANSWERS[name]
    assert rewards["math"]([text], [{"answer": answer}])[0] in (0.0, None)


@pytest.mark.parametrize("name", FORMS)
def test_form(rewards: dict[str, Any], name: str) -> None:
    text, score = FORMS[name]
    assert rewards["format"]([text], [{}]) == [score]


def test_functions_lose_what_they_hang_on_and_nothing_else(
    rewards: dict[str, Any], capfd: pytest.CaptureFixture
) -> None:
    reward = rewards["function"]
    assert dict(zip(FUNCTIONS, reward(list(FUNCTIONS), [{}] * len(FUNCTIONS)), strict=True)) == FUNCTIONS
    assert reward.counters == {"timeouts": 1, "errors": 2}
    assert reward(["fine"], [{}]) == [1.0]
    capfd.readouterr()  # five megabytes
