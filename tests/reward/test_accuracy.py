"""Accuracy: what is paid, what is not, what is unscorable, and math-verify behind its time-out."""

import inspect
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.errors import UserError
from alignment.reward.accuracy import Accuracy
from alignment.reward.worker import Guard

CONF = Path(__file__).parents[2] / "conf" / "reward"


def one(reward: Accuracy, completion: str, answer: object) -> float | None:
    return reward([completion], [{"prompt": "p", "answer": answer}])[0]


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("12", "12", 1.0),
        ("The answer is 12.", "12", 1.0),
        ("13", "12", 0.0),
        ("it is 42, or 41", "42", 0.0),
        ("", "12", 0.0),
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{12} then \boxed{13}", "13", 1.0),
        ("$70,000.", "70000", 1.0),
        ("12", 12, 1.0),
        ("0.50", 0.5, 1.0),
        ("42", "6 * 7 = 42\n#### 42", 1.0),
        ("12", None, None),
        ("12", " ", None),
        ("12", r"\boxed{12", None),  # a right answer that cannot be read pays nobody
    ],
)
def test_scores(completion: str, answer: object, score: float | None) -> None:
    assert one(Accuracy(), completion, answer) == score


def test_each_completion_is_scored_with_its_own_row() -> None:
    rows = [{"answer": "1"}, {}, {"answer": "3"}, {"answer": "4"}]
    assert Accuracy()(["1", "2", "2", "4"], rows) == [1.0, None, 0.0, 1.0]


def test_another_column_and_another_form() -> None:
    reward = Accuracy(column="target", extract="boxed")
    rows = [{"target": "5", "answer": "6"}] * 2
    assert reward([r"\boxed{5}", "5"], rows) == [1.0, 0.0]


def test_the_reasoning_is_left_out() -> None:
    reward = Accuracy(reasoning_end="</think>")
    assert one(reward, r"<think>\boxed{41}</think> 42", "42") == 1.0
    assert one(reward, r"<think>42</think> 41", "42") == 0.0
    assert one(reward, "<think>the answer is 42", "42") == 0.0  # it never came to an answer


def test_an_answer_of_the_wrong_type_names_row_and_column() -> None:
    with pytest.raises(UserError, match=r"column 'answer' of row 1 is \['4'\].*reward\.accuracy\.column"):
        Accuracy()(["1", "2"], [{"answer": "3"}, {"answer": ["4"]}])


def test_the_yaml_says_what_the_code_does() -> None:
    node = yaml.safe_load((CONF / "accuracy.yaml").read_text())["accuracy"]
    defaults = {name: parameter.default for name, parameter in inspect.signature(Accuracy).parameters.items()}
    assert {name: value for name, value in node.items() if name != "_target_"} == defaults


@pytest.fixture(scope="module")
def math() -> Accuracy:
    return Accuracy(verifier="math", timeout=30)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("13", "13", 1.0),
        (r"\boxed{1 + x}", "x+1", 1.0),
        (r"\boxed{\frac{\sqrt3}{2}}", r"\sqrt{3}/2", 1.0),
        (r"\boxed{12} then \boxed{13}", "13", 1.0),
        (r"\boxed{x - 1}", "x+1", 0.0),
        ("28%", "0.28", 0.0),
        (r"\boxed{\frac{}{}}", "x", 0.0),
    ],
)
def test_math_verify_compares_expressions(math: Accuracy, completion: str, answer: str, score: float) -> None:
    assert one(math, completion, answer) == score


def test_math_verify_works_in_a_thread(math: Accuracy) -> None:
    """Its own time-outs use signals, which raise outside the main thread."""
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.append(one(math, r"\boxed{b+a}", "a+b")))
    thread.start()
    thread.join()
    assert scores == [1.0]
    assert math.counters == {"timeouts": 0, "errors": 0}


def test_a_comparison_that_hangs_is_unscorable(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def make():\n"
        "    return lambda pairs: [time.sleep(60) if a == 'hang' else a == g for a, g in pairs]\n"
    )
    reward = Accuracy(verifier="math")
    reward._math = Guard(f"{tmp_path / 'slow.py'}:make", timeout=0.5)
    reward._math.worker.start()
    started = time.perf_counter()
    assert reward([r"\boxed{hang}", r"\boxed{a}", r"\boxed{b}"], [{"answer": "a"}] * 3) == [None, 1.0, 0.0]
    assert time.perf_counter() - started < 5
    assert reward.counters == {"timeouts": 1, "errors": 0}
    reward.close()


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 1.0),
        ("B) Paris", "(B)", 1.0),
        ("The answer is (B) Paris, of course.", "B", 1.0),
        ("Answer: B. Paris is the capital.", "B", 1.0),
        ("The answer is B, because it is the capital.", "B", 1.0),
        (r"so \boxed{\text{(B)}}", "B", 1.0),
        ("Answer: **B**", 1, 1.0),  # numbered from 0
        ("The answer is B", "C", 0.0),
        ("(B) or (C)", "B", 0.0),
        ("The answer is B or C", "B", 0.0),
        ("(B), C", "B", 0.0),
        ("A) 3 B) 4", "A", 0.0),
        ("A dog", "A", 0.0),
        ("I think it is B", "B", 0.0),  # in passing
        ("", "B", 0.0),
        ("B", "", None),
        ("B", None, None),
    ],
)
def test_multiple_choice(completion: str, answer: object, score: float | None) -> None:
    assert one(Accuracy(verifier="choice"), completion, answer) == score


@pytest.mark.parametrize("answer", ["Paris", 26, -1, True, 1.0])
def test_a_right_choice_that_is_no_letter_is_refused(answer: object) -> None:
    with pytest.raises(UserError, match=r"reward\.accuracy: column 'answer' of row 0 is .* must be a letter"):
        one(Accuracy(verifier="choice"), "B", answer)


def test_exactly_the_same_text() -> None:
    exact = Accuracy(verifier="exact", extract="whole")
    assert [one(exact, text, "Paris") for text in ("Paris", " Paris\n", "paris", "Paris.", "")] == [1, 1, 0, 0, 0]
    assert one(exact, "1,000", "1000") == 0.0
    assert one(Accuracy(verifier="exact"), r"so \boxed{x+1}", "x+1") == 1.0


def test_numbers_within_a_tolerance() -> None:
    """1% of 200 is 2; of 0 nothing is within any share."""
    close = Accuracy(tolerance=0.01)
    assert [one(close, text, "200") for text in ("198", "202", "197.9", "202.1", "-200", "many")] == [1, 1, 0, 0, 0, 0]
    assert [one(close, text, "0") for text in ("0", "0.001")] == [1, 0]
    assert one(close, "3.14", "22/7") == 1.0  # 22/7 - 3.14 = 0.0029
    assert one(Accuracy(), "3.14", "22/7") == 0.0


@pytest.mark.parametrize(("verifier", "tolerance"), [("exact", 0.1), ("choice", 0.1), ("text", 1.0), ("text", -0.1)])
def test_a_tolerance_that_means_nothing_is_refused(verifier: Any, tolerance: float) -> None:
    with pytest.raises(UserError, match=r"reward\.accuracy\.tolerance: .* type reward\.accuracy\.tolerance="):
        Accuracy(verifier=verifier, tolerance=tolerance)
