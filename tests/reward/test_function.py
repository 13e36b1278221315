"""A user's own function: what it is given, what it may return, and what a hang or an error costs."""

import os
import time
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.reward.combine import RewardError, RewardSet
from alignment.reward.function import Function

CODE = """
import os, time
import numpy as np

def trl(prompts, completions, **columns):
    return [float(c == a) for c, a in zip(completions, columns["answer"])]

def named(completions, answer, factor=2.0):
    return [factor if c == a else None for c, a in zip(completions, answer)]

def order(completions, number):
    return [1.0 if c == str(n) else 0.0 for c, n in zip(completions, number)]

def array(completions):
    return np.arange(len(completions), dtype=np.float32)

def one_for_all(completions):
    return [1.0]

def scalar(completions):
    return 1.0

def text(completions):
    return ["good" for c in completions]

def not_finite(completions):
    return [float("nan") for c in completions]

def wants_more(completions, difficulty):
    return [0.0 for c in completions]

def chat(completions, prompts):
    wanted = [{"role": "assistant", "content": "x"}]
    return [float(c == wanted) if isinstance(c, list) else 0.5 for c in completions]

def fails_on_c(completions):
    if "c" in completions:
        raise KeyError("no c")
    return [1.0 for c in completions]

def hangs_on_c(completions):
    if "c" in completions:
        time.sleep(60)
    return [1.0 for c in completions]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scores(name: str, completions: list[str], rows: list[dict], **settings) -> list[float | None]:
    """Through RewardSet, as in a run."""
    reward = Function(path=f"mine.py:{name}", **settings)
    total = RewardSet({"function": (reward, 1.0)})(completions, rows).total
    reward.close()
    return total


ROWS = [{"prompt": "p", "answer": a, "number": i} for i, a in enumerate("abcd")]


def test_the_convention_of_trl() -> None:
    assert scores("trl", ["a", "x", "c", "d"], ROWS) == [1.0, 0.0, 1.0, 1.0]


def test_a_function_names_what_it_wants_and_may_return_none() -> None:
    assert scores("named", ["a", "x", "c", "x"], ROWS) == [2.0, None, 2.0, None]


def test_columns_come_in_the_order_of_the_completions() -> None:
    rows = [ROWS[i] for i in (3, 0, 2, 0)]
    assert scores("order", ["3", "0", "2", "1"], rows) == [1.0, 1.0, 1.0, 0.0]


def test_an_array_is_a_list() -> None:
    assert scores("array", ["a", "b", "c"], ROWS[:3]) == [0.0, 1.0, 2.0]


def test_messages_as_trl_passes_them() -> None:
    rows = [{"prompt": [{"role": "user", "content": "q"}]}, {"prompt": "q"}]
    assert scores("chat", ["x", "x"], rows, messages=True) == [1.0, 0.5]
    assert scores("chat", ["x", "x"], rows) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_for_all", "returned 1 scores for 4 completions"),
        ("scalar", "must return a list of 4 numbers or None, got 1.0"),
        ("text", "returned 'good' for completion 0"),
        ("not_finite", "returned nan for completion 0: return a finite number, or None"),
        ("wants_more", r"asks for \['difficulty'\], which the rows do not have"),
        ("fails_on_c", r"mine\.py.*no c"),
    ],
)
def test_what_is_wrong_is_said_by_name(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"(?s)reward 'function' .mine.py:{name}.*{message}"):
        scores(name, list("abcd"), ROWS)


def test_an_error_can_cost_its_completion_alone() -> None:
    reward = Function(path="mine.py:fails_on_c", on_error="missing")
    assert reward(list("abcd"), ROWS) == [1.0, 1.0, None, 1.0]
    assert reward.counters == {"timeouts": 0, "errors": 1}
    reward.close()


def test_a_hang_costs_its_completion_alone() -> None:
    reward = Function(path="mine.py:hangs_on_c", timeout=1.0)
    started = time.perf_counter()
    assert reward(list("abcd"), ROWS) == [1.0, 1.0, None, 1.0]
    assert time.perf_counter() - started < 30  # two limits and two starts that import numpy; it sleeps for 60 s
    assert reward.counters == {"timeouts": 1, "errors": 0}
    assert reward(list("abd"), ROWS[:3]) == [1.0, 1.0, 1.0]
    reward.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine.py", "names no function: type reward.function.path=my_file.py:score"),
        ("absent.py:score", "there is no file"),
        ("mine.py:absent", r"has no 'absent'; it defines .*'trl'"),
        ("no_such_package.module:score", "No module named"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_at_once(path: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)reward.function.path: .*{message}"):
        Function(path=path)


def test_a_path_is_found_from_another_folder(folder: Path) -> None:
    reward = Function(path="mine.py:array")
    os.chdir("/")
    reward.close()  # the process that starts next starts elsewhere
    assert reward(["a", "b"], ROWS[:2]) == [0.0, 1.0]
    reward.close()


def test_a_column_that_takes_the_name_of_an_argument_is_refused() -> None:
    with pytest.raises(RewardError, match=r"columns \['completions'\]"):
        scores("trl", ["a"], [{"prompt": "p", "answer": "a", "completions": "x"}])
