"""The format reward: the completion alone, in full, and patterns that would never end."""

import time
from pathlib import Path

import pytest
import yaml

from alignment.errors import UserError
from alignment.reward.format import Format

CONF = Path(__file__).parents[2] / "conf" / "reward"
PATTERN = yaml.safe_load((CONF / "format.yaml").read_text())["format"]["pattern"]


@pytest.fixture(scope="module")
def think() -> Format:
    return Format(pattern=PATTERN, timeout=30)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>\n2 + 3\n</think>\n5", 1.0),
        ("<think></think>5", 1.0),
        ("<think>a < b</think><answer>5</answer>", 1.0),
        ("5", 0.0),
        ("", 0.0),
        ("<think>5", 0.0),
        ("<think>5</think>", 0.0),  # no answer
        ("<think>5</think> \n", 0.0),
        ("so <think>5</think> 5", 0.0),  # something before
        ("<think><think>5</think></think> 5", 0.0),
        ("<think>4</think> <think>5</think> 5", 0.0),
    ],
)
def test_one_block_of_reasoning_and_an_answer(think: Format, completion: str, score: float) -> None:
    assert think([completion], [{}]) == [score]


def test_the_prompt_earns_nothing() -> None:
    reward = Format(pattern=r".*\\boxed\{.*\}.*", timeout=30)
    rows = [{"prompt": r"Put it in \boxed{}."}] * 2
    assert reward(["", r"it is \boxed{5}"], rows) == [0.0, 1.0]
    reward.close()


def test_the_whole_completion_must_match() -> None:
    reward = Format(pattern=r"\d+", timeout=30)
    assert reward(["12", "12 or so", "so 12", "12\n"], [{}] * 4) == [1.0, 0.0, 0.0, 0.0]
    reward.close()


def test_a_completion_on_which_the_pattern_never_ends_is_lost_alone() -> None:
    reward = Format(pattern=r"(a+)+b", timeout=0.5)
    reward._match.worker.start()
    started = time.perf_counter()
    assert reward(["aab", "a" * 50, "ac"], [{}] * 3) == [1.0, None, 0.0]
    assert time.perf_counter() - started < 5
    assert reward.counters == {"timeouts": 1, "errors": 0}
    reward.close()


def test_the_default_pattern_takes_linear_time(think: Format) -> None:
    for text in ("<think>" * 5000, "<think>" + "a " * 20000, "<think></think>" + " " * 20000, " " * 20000):
        started = time.perf_counter()
        assert think([text], [{}]) == [0.0]
        assert time.perf_counter() - started < 2


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.format\.pattern: .* is no regular expression"):
        Format(pattern="(", timeout=1.0)
