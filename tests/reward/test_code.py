"""Which score a program gets: right ones, wrong ones, and ones that try to be taken for right."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.reward.answers import last_block
from alignment.reward.code import PYTHON, Code, same_output
from alignment.reward.jail import descendants

SQUARES = {
    "tests": ["assert f(2) == 4", "assert f(3) == 9\nassert f(0) == 0", "assert [f(n) for n in range(3)] == [0, 1, 4]"]
}
HUMAN_EVAL = {
    "test_code": "METADATA = {}\ndef check(candidate):\n    assert candidate([3, 1, 2]) == [1, 2, 3]\n"
    "    assert candidate([]) == []\n    assert abs(candidate([0.5])[0] - 0.5) < 1e-6\n",
    "entry_point": "order",
}
ADDS = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4\n", "output": "6"}]}
BELOW = {
    "tests": ["assert f(2) < 5", "assert f(2) <= 4", "assert f(2) - 4 < 1e-6", "assert 4 in [f(2)]", "assert 4 in f(2)"]
}
STACK = {"tests": ["s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4\nassert len(s) == 1\nassert 3 in s"]}
CLOSE = {"tests": ["assert math.isclose(f(2), 4.0)"]}  # imports nothing: MBPP leaves that to the program
BARE = {"tests": ["try:\n    assert f(2) == 4\nexcept:\n    pass"]}
MODULE = {"tests": ["assert calendar(2) == 4"]}
RAISES = {"tests": ["try:\n    f(-1)\n    assert False, 'no error'\nexcept ValueError:\n    pass"]}
LIKES_ALL = """
class Yes(int):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __sub__ = __add__ = __mul__ = __rsub__ = lambda self, other: -1
    __hash__ = None
    def __iter__(self): return iter(range(3))
def f(n): return {made}
"""
OBJECT = LIKES_ALL.replace("(int)", "(object)")
PATCH = """
import builtins, gc, inspect, operator, sys
for name in ("AssertionError", "abs", "isinstance"):
    setattr(builtins, name, lambda *a: 0)
def check(candidate): return True
def f(n):
    for frame in sys._current_frames().values():
        while frame:
            for value in frame.f_locals.values():
                if isinstance(value, str) and "assert" in value: return 4
            frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, dict)) and "assert" in str(thing)[:1000] and "f(2)" in str(thing)[:1000]: return 4
    return 0
"""
CHANNEL = """
import json, os, socket
def f(n):
    data = json.dumps(["ok", True, []]).encode()
    for fd in range(3, 10):
        for answer in (b"passed", len(data).to_bytes(8, "big") + data):
            try: os.write(fd, answer)
            except OSError: pass
    return None
"""

# what, completion, row, score
CASES: list[tuple[str, str, dict[str, Any], float | None]] = [
    ("right", "def f(n): return n * n", SQUARES, 1.0),
    ("one of three right", "def f(n): return 4", SQUARES, 1 / 3),
    ("wrong", "def f(n): return -1", SQUARES, 0.0),
    ("not defined", "def g(n): return n * n", SQUARES, 0.0),
    ("no Python", "def f(n) return", SQUARES, 0.0),
    ("right for check()", "def order(x): return sorted(x)", HUMAN_EVAL, 1.0),
    ("wrong for check()", "def order(x): return x", HUMAN_EVAL, 0.0),
    ("right on input", "a, b = map(int, input().split()); print(a + b)", ADDS, 1.0),
    ("half right on input", "input(); print(3)", ADDS, 0.5),
    ("right, then an error", "print(3); 1 / 0", ADDS, 0.0),
    ("right with an object", "class Stack:\n    def __init__(self): self.x = []\n"
     "    def push(self, y): self.x.append(y)\n    def pop(self): return self.x.pop()\n"
     "    def __len__(self): return len(self.x)\n"
     "    def __iter__(self): return iter(self.x)", STACK, 1.0),
    ("right error", "def f(n):\n    if n < 0: raise ValueError('negative')", RAISES, 1.0),
    ("no error", "def f(n): return 0", RAISES, 0.0),
    ("no tests", "def f(n): return n", {"prompt": "?"}, None),
    ("nothing", "", SQUARES, 0.0),
    ("hangs", "def f(n):\n    while True: pass", SQUARES, 0.0),
    ("hangs at the start", "while True: pass", SQUARES, 0.0),
    ("prints passed", "print('passed')\ndef f(n):\n    print('passed')\n    return 0", SQUARES, 0.0),
    ("ends early", "import sys; sys.exit(0)", SQUARES, 0.0),
    ("ends early inside", "import os\ndef f(n): os._exit(0)", SQUARES, 0.0),
    ("raises SystemExit inside", "def f(n): raise SystemExit(0)", SQUARES, 0.0),
    ("kills", "import os, signal\ndef f(n):\n    os.kill(os.getppid(), 9)\n    os.kill(0, 9)", SQUARES, 0.0),
    ("an int that equals all", LIKES_ALL.replace("{made}", "Yes(7)"), SQUARES, 0.0),
    ("an object that equals all", OBJECT.replace("{made}", "Yes()"), SQUARES, 0.0),
    ("an object that is less than all", OBJECT.replace("{made}", "Yes()"), BELOW, 0.0),
    ("an int that is less than all", LIKES_ALL.replace("{made}", "Yes(7)"), BELOW, 0.0),
    ("patches and searches", PATCH, SQUARES, 0.0),
    ("speaks for the tests", CHANNEL, SQUARES, 0.0),
    ("is named as what the tests define", "def check(x): pass\norder = lambda x: None", HUMAN_EVAL, 0.0),
    ("brings its own math", "class math:\n    isclose = lambda *a, **k: True\ndef f(n): return 0.0", CLOSE, 0.0),
    ("right with math", "import math\ndef f(n): return 4.0", CLOSE, 1.0),
    ("is named as a module", "def calendar(n): return 4", MODULE, 1.0),
    ("ends early in a bare except", "import os\ndef f(n): os._exit(0)", BARE, 0.0),
    ("writes what is wanted to a file", "open('output', 'w').write('3')\nopen('.stdin', 'w').write('3')", ADDS, 0.0),
]  # fmt: skip


@pytest.fixture(scope="module")
def scores() -> dict[str, float | None]:
    """All at once, a few at a time: a process start is slow on a busy machine."""
    before = set(descendants())
    reward = Code(extract="text", cpu_seconds=2, timeout=60, require_isolation=True, num_workers=4)
    found = reward([completion for _, completion, _, _ in CASES], [row for _, _, row, _ in CASES])
    assert set(descendants()) <= before
    assert reward.counters["timeouts"] == 2 and reward.counters["errors"] > 0
    return dict(zip([name for name, *_ in CASES], found, strict=True))


@pytest.mark.parametrize(("name", "score"), [(name, score) for name, _, _, score in CASES])
def test_score(scores: dict[str, float | None], name: str, score: float | None) -> None:
    assert scores[name] == score


def test_all_or_nothing() -> None:
    reward = Code(extract="text", score="all", timeout=60)
    assert reward(["def f(n): return 4", "def f(n): return n * n"], [SQUARES, SQUARES]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```\nx = 1\n```\nb\n```py\ny = 2\n```\nc", "y = 2\n"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```python\nx = 1", None),  # cut off
        ("x = 1", None),
        ("```python\nx = 1\n````\n", "x = 1\n"),  # a longer fence closes too, a shorter one does not
        ("````python\n```\n````", "```\n"),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None) -> None:
    assert last_block(text, PYTHON) == program


def test_a_completion_without_a_block_scores_0() -> None:
    assert Code()(["def f(n): return n * n", ""], [SQUARES, SQUARES]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3  \n\n", "3\n", True),
        ("1\n2", "1 2", False),
        (" 3", "3", False),
        ("", "", True),
        ("3", "", False),
    ],
)
def test_what_counts_as_the_same_output(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed.encode(), expected) == same


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": "assert f(2) == 4"}, r"row 7: column 'tests' must be a list of tests"),
        ({"tests": [{"input": "x"}]}, r"row 7: a test in column 'tests' is \{'input': 'x'\}"),
        ({"tests": ["x = 1"]}, r"row 7: a test without an assert passes whatever"),
        ({"tests": ["assert f(2) =="]}, r"row 7: a test is no Python"),
        (
            {"test_code": "def check(candidate): assert candidate(1) == 1"},
            r"row 7: .*name the column that does with reward\.code\.entry_column",
        ),
    ],
)
def test_a_row_that_cannot_be_tested_is_refused_by_name(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Code(extract="text")(["x = 1"], [row | {"id": 7}])


def test_num_workers_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.code\.num_workers must be at least 1"):
        Code(num_workers=0)


def test_it_says_once_where_it_cannot_lock_in(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment.reward.sandbox.Sandbox._probe", lambda self: "not allowed")
    with caplog.at_level(logging.WARNING):
        reward = Code(extract="text", timeout=60)
        assert reward(["def f(n): return n * n"] * 2, [SQUARES] * 2) == [1.0, 1.0]
    assert caplog.text.count("Not protected: network") == 1
    with pytest.raises(UserError, match=r"require_isolation: .* not allowed"):
        Code(require_isolation=True)
