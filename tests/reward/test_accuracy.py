"""Accuracy: what is paid, what is not, what is unscorable, and math-verify behind its time-out."""

import inspect
import threading
import time
from pathlib import Path

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
