"""The share of a row's tests that the completion's program passes."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from alignment.errors import UserError
from alignment.reward.answers import last_block
from alignment.reward.sandbox import Limits, Sandbox

PYTHON = ("", "python", "py", "python3")  # marks of a block


@dataclass(frozen=True)
class Stdio:
    """Run the program on `input`; what it prints must be `output`, and it must end with exit code 0."""

    input: str
    output: str


@dataclass(frozen=True)
class Asserts:
    """Python with asserts about what the program defines; with an entry point also `check(candidate)`."""

    source: str
    entry_point: str | None


Test = Stdio | Asserts


class Code:
    """Runs the program in each completion against its row's tests, each test in a sandbox of its own (sandbox.py).

    A row's tests are `rows[i][column]`, a list of {"input": ..., "output": ...} (standard input, expected standard
    output) and of texts with asserts (MBPP), and `rows[i][code_column]`, one text (HumanEval: it defines
    `check(candidate)`, and `rows[i][entry_column]` names the candidate). A row with neither is unscorable (None).
    The right answers are never in a process that runs the program. A program that overruns a limit, crashes or is not
    there scores 0 for that test, not None: otherwise a hang would pay. A time-out ends the program's tests, those left
    count as failed.

    extract: "block" = the last closed Markdown block that is marked as Python or not marked; "text" = everything.
    score: "share" of the tests passed, or "all" = 1 where all passed, else 0.
    num_workers: programs at a time; null = one for each processor.
    timeout: wall seconds for one test. cpu_seconds, memory_mb, num_processes, file_mb, output_kb: see Limits.
    require_isolation: refuse to run where the kernel does not allow namespaces.
    weight: factor of this reward in the total.
    """

    def __init__(
        self,
        *,
        column: str = "tests",
        code_column: str = "test_code",
        entry_column: str = "entry_point",
        extract: Literal["block", "text"] = "block",
        score: Literal["share", "all"] = "share",
        num_workers: int | None = None,
        timeout: float = 20.0,
        cpu_seconds: int = 5,
        memory_mb: int = 512,
        num_processes: int = 16,
        file_mb: int = 16,
        output_kb: int = 1024,
        require_isolation: bool = False,
        weight: float = 1.0,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise UserError(f"reward.code.num_workers must be at least 1, or null for one per processor: {num_workers}")
        self.column, self.code_column, self.entry_column = column, code_column, entry_column
        self.extract, self.score, self.weight = extract, score, weight
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        limits = Limits(
            seconds=timeout,
            cpu_seconds=cpu_seconds,
            memory_mb=memory_mb,
            num_processes=num_processes,
            file_mb=file_mb,
            output_kb=output_kb,
        )
        self.sandbox = Sandbox(limits, require_isolation=require_isolation)
        self.counters = {"timeouts": 0, "errors": 0}
        self._lock = threading.Lock()

    def __call__(self, completions: list[str], rows: list[dict]) -> list[float | None]:
        """Scores from 0 to 1, or None, one for each completion."""
        tests = [list(self._tests(row, i)) for i, row in enumerate(rows)]
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="reward.code") as pool:
            try:
                return list(pool.map(self._score, completions, tests))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _score(self, completion: str, tests: list[Test]) -> float | None:
        if not tests:
            return None
        program = completion if self.extract == "text" else last_block(completion, PYTHON)
        if program is None:
            return 0.0
        num_passed = 0
        for test in tests:
            verdict = self._verdict(program, test)
            num_passed += verdict == "passed"
            if verdict == "timeout" or (verdict != "passed" and self.score == "all"):
                break
        return num_passed / len(tests) if self.score == "share" else float(num_passed == len(tests))

    def _verdict(self, program: str, test: Test) -> str:
        """passed, failed, timeout or error; the last two are counted."""
        if isinstance(test, Asserts):
            verdict: str = self.sandbox.verdict(program, test.source, test.entry_point)
            verdict = "error" if verdict == "gone" else verdict
        else:
            outcome = self.sandbox.run(program, test.input)
            if outcome.end == "timeout":
                verdict = "timeout"
            elif outcome.end == "output" or outcome.code != 0:
                verdict = "error"
            else:
                verdict = "passed" if same_output(outcome.stdout, test.output) else "failed"
        kind = {"timeout": "timeouts", "error": "errors"}.get(verdict)
        if kind:
            with self._lock:
                self.counters[kind] += 1
        return verdict

    def _tests(self, row: dict[str, Any], index: int) -> Iterator[Test]:
        """The tests of one row. UserError where its columns cannot be read."""
        where = f"reward.code: row {row.get('id', index)}"
        entry = row.get(self.entry_column)
        listed, code = row.get(self.column), row.get(self.code_column)
        if not (listed is None or isinstance(listed, (list, tuple))) or not (code is None or isinstance(code, str)):
            raise UserError(
                f"{where}: column '{self.column}' must be a list of tests and '{self.code_column}' one text, got "
                f"{listed!r:.80} and {code!r:.80}; name others with reward.code.column and reward.code.code_column"
            )
        for test in listed or ():
            if isinstance(test, str):
                yield asserts(test, entry, where)
            elif isinstance(test, dict) and isinstance(test.get("output"), str):
                yield Stdio(str(test.get("input") or ""), test["output"])
            else:
                raise UserError(
                    f"{where}: a test in column '{self.column}' is {test!r:.100}: it must be a text with asserts, or "
                    '{"input": text, "output": text}'
                )
        if code:
            yield asserts(code, entry, where)


def asserts(source: str, entry: Any, where: str) -> Asserts:
    """A test of asserts, refused where it would pass whatever the program does."""
    try:
        tree = ast.parse(source, "tests")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: a test is no Python: {error}: {source!r:.100}") from error
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        raise UserError(f"{where}: a test without an assert passes whatever the program does: {source!r:.100}")
    if "def check(" in source and not isinstance(entry, str):
        raise UserError(
            f"{where}: its test defines check(candidate), but no function is named as the candidate: name the column "
            f"that does with reward.code.entry_column (it holds {entry!r:.40} here)"
        )
    return Asserts(source, entry if isinstance(entry, str) else None)


def same_output(printed: bytes, expected: str) -> bool:
    """Line by line, whitespace at the ends of lines and empty lines at the end aside."""
    return _lines(printed.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
