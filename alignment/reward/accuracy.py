"""1 where the completion's final answer is the dataset's, 0 where not, nothing where the dataset has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

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
    verifier: "text" compares numbers exactly and other answers as text. "math" also asks math-verify whether two
        expressions are equal (x+1 and 1+x), in a process that is killed after `timeout` seconds; that completion is
        then unscorable (None) and counted in `counters["timeouts"]`.
    weight: factor of this reward in the total.
    """

    def __init__(
        self,
        *,
        extract: Form = "strict",
        column: str = "answer",
        reasoning_end: str | None = None,
        verifier: Literal["text", "math"] = "text",
        timeout: float = 5.0,
        weight: float = 1.0,
    ) -> None:
        self.extract: Form = extract
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
        same = answers.equal(answer, gold) or self._same_expression(answer, gold)
        return None if same is None else float(same)

    def _gold(self, row: dict[str, Any], index: int) -> str | None:
        value = row.get(self.column)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"reward.accuracy: column '{self.column}' of row {row.get('id', index)} is {value!r:.100}: it must be "
                "text or a number; name another one with reward.accuracy.column=<column>"
            )
        return None if value is None else answers.gold_answer(value)

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
