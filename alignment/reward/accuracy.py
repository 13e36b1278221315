"""1 where the completion's final answer is the dataset's, 0 where not, nothing where the dataset has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from alignment.errors import UserError
from alignment.reward import answers
from alignment.reward.answers import Form
from alignment.reward.worker import Guard


class Accuracy:
    """Compares the answer in each completion with `rows[i][column]`; how, is in the docstring of `answers.py`.

    Only the completion is read, never the prompt, and by default only forms that state a final answer count: a right
    number mentioned in passing earns nothing.

    extract: which forms count as an answer.
    column: dataset column with the right answer, or with a solution that ends in a box or ####.
    reasoning_end: a closing tag such as "</think>": the answer must come after the last one.
    verifier: "text" compares numbers by value and other answers as text. "math" also asks math-verify whether two
        expressions are equal (x+1 and 1+x), in a process that is killed after `timeout` seconds; that completion is
        then unscorable (None) and counted in `counters["timeouts"]`. "exact" compares character by character. "choice"
        compares the letters picked of a multiple-choice question; a dataset may number the options from 0 instead.
    tolerance: numbers are equal up to this share of the right one; 0 = exactly.
    weight: factor of this reward in the total.
    """

    key: ClassVar[str] = "reward.accuracy"

    def __init__(
        self,
        *,
        extract: Form = "strict",
        column: str = "answer",
        reasoning_end: str | None = None,
        verifier: Literal["text", "math", "exact", "choice"] = "text",
        tolerance: float = 0.0,
        timeout: float = 5.0,
        weight: float = 1.0,
    ) -> None:
        if not 0 <= tolerance < 1:
            raise UserError(
                f"{self.key}.tolerance: {tolerance} is no share of a number: type {self.key}.tolerance=0.01"
            )
        if tolerance and verifier in ("exact", "choice"):
            raise UserError(
                f"{self.key}.tolerance: verifier={verifier} compares no numbers: type {self.key}.tolerance=0"
            )
        self.extract: Form = extract
        self.verifier, self.tolerance = verifier, tolerance
        self.column, self.reasoning_end, self.weight = column, reasoning_end, weight
        self._math: Guard | None = None
        if verifier == "math":
            self._math = Guard(f"{__name__}:math_verifier", timeout=timeout, name="math-verify")

    def __call__(self, completions: list[str], rows: list[dict]) -> list[float | None]:
        """Scores 1.0, 0.0 or None, one for each completion."""
        return [self._score(text, row, i) for i, (text, row) in enumerate(zip(completions, rows, strict=True))]

    @property
    def counters(self) -> dict[str, int]:
        return self._math.counters if self._math else {}

    def close(self) -> None:
        """End the process of math-verify, if there is one."""
        if self._math:
            self._math.close()

    def _score(self, completion: str, row: dict[str, Any], index: int) -> float | None:
        gold = self._gold(row, index)
        if gold is None:
            return None
        text = completion if self.reasoning_end is None else answers.after(completion, self.reasoning_end)
        answer = None if text is None else answers.extract(text, self.extract)
        if answer is None:
            return 0.0
        same = self._same(answer, gold)
        return None if same is None else float(same)

    def _same(self, answer: str, gold: str) -> bool | None:
        match self.verifier:
            case "exact":
                return answer == gold
            case "choice":
                return answers.choice(answer) == gold
        return answers.equal(answer, gold, self.tolerance) or self._same_expression(answer, gold)

    def _gold(self, row: dict[str, Any], index: int) -> str | None:
        value = row.get(self.column)
        if self.verifier == "choice" and value is not None:
            return self._letter(value, row, index)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            raise self._bad(value, row, index, "text or a number")
        return None if value is None else answers.gold_answer(value)

    def _letter(self, value: Any, row: dict[str, Any], index: int) -> str | None:
        if type(value) is int and 0 <= value < 26:
            return chr(ord("A") + value)
        gold = answers.gold_answer(value) if isinstance(value, str) else None
        letter = gold and answers.choice(gold)
        if letter is None and not (isinstance(value, str) and not value.strip()):
            raise self._bad(value, row, index, "a letter, or the number of an option from 0")
        return letter

    def _bad(self, value: Any, row: dict[str, Any], index: int, what: str) -> UserError:
        return UserError(
            f"{self.key}: column '{self.column}' of row {row.get('id', index)} is {value!r:.100}: it must be {what}; "
            f"name another one with {self.key}.column=<column>"
        )

    def _same_expression(self, answer: str, gold: str) -> bool | None:
        """What math-verify says; two numbers were already compared exactly."""
        if self._math is None or (answers.number(answer) is not None and answers.number(gold) is not None):
            return False
        return self._math.alone((answer, gold))


def math_verifier() -> Callable[[Sequence[tuple[str, str]]], list[bool]]:
    """Runs in the worker. Its time-outs by alarm signal are off: the process is killed from outside instead."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs that are off

    def expression(text: str) -> list:
        return parse(rf"\boxed{{{answers.unwrapped(text)}}}", parsing_timeout=0)

    def same(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [bool(verify(expression(gold), expression(answer), timeout_seconds=0)) for answer, gold in pairs]

    return same
