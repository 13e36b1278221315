"""Sums with one right answer each, made on the spot: what the rewards can verify and a small model can learn."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from alignment.data.messages import turn
from alignment.data.schema import Form
from alignment.data.split import hold_out, num_held_out
from alignment.errors import UserError

SIGNS = {"+": "+", "-": "-", "*": "*"}
# Difficulty -> operations, and the range of both numbers.
LEVELS: dict[int, tuple[list[str], int, int]] = {
    1: (["+"], 1, 9),
    2: (["+"], 10, 50),
    3: (["*"], 2, 12),
    4: (["+", "-", "*"], 10, 99),
}
COMMUTATIVE = ("+", "*")
Problem = tuple[int, str, int]


class Arithmetic:
    """All problems `a op b` with both numbers from low to high, or `num_problems` of them where there are more.

    difficulty: 1 = a + b up to 9 (81 problems), 2 = a + b from 10 to 50 (1,681), 3 = a * b from 2 to 12 (121),
        4 = sums, differences and products from 10 to 99 (24,300). `operations`, `low` and `high` override its parts.
    heldout: share below 1, or number, of the problems held out. a + b and b + a stay together, so that no held-out sum
        has been seen mirrored: at difficulty 1, a quarter is 20 of 81.
    seed: which problems are held out, and their order; apart from the run's seed, so that runs can be compared.
    question: what is asked; {a}, {op} and {b} are filled in.
    """

    forms: ClassVar[tuple[str, ...]] = (
        "prompts",
        "demonstrations",
        "pairs",
        "unpaired",
        "ranked",
        "scored",
        "stepwise",
    )

    def __init__(
        self,
        *,
        difficulty: int = 1,
        operations: list[str] | None = None,
        low: int | None = None,
        high: int | None = None,
        num_problems: int = 10_000,
        heldout: float | int = 0.25,
        seed: int = 0,
        question: str = "What is {a} {op} {b}? Reply with the number only.",
    ) -> None:
        if difficulty not in LEVELS:
            raise UserError(
                f"data.difficulty: {difficulty} is none of {', '.join(map(str, LEVELS))}: type data.difficulty=1"
            )
        level = LEVELS[difficulty]
        self.operations = list(dict.fromkeys(operations or level[0]))
        self.low, self.high = level[1] if low is None else low, level[2] if high is None else high
        self.num_problems, self.heldout, self.seed, self.question = num_problems, heldout, seed, question
        unknown = [op for op in self.operations if op not in SIGNS]
        if unknown:
            raise UserError(f"data.operations: {unknown[0]!r} is none of + - *: type 'data.operations=[+,*]'")
        if self.low > self.high:
            raise UserError(f"data.low: {self.low} is above data.high={self.high}: type data.low={self.high}")
        if num_held_out(heldout, self._total, "data.heldout") >= self._total:
            raise UserError(
                f"data.heldout: {heldout} of {self._total} problems leaves none to train on: type data.heldout=0.25, "
                "or data.high=<larger> for more problems"
            )
        if "{a}" not in question or "{b}" not in question or ("{op}" not in question and len(self.operations) > 1):
            raise UserError("data.question: it must contain {a}, {b} and {op}: type 'data.question=\"{a} {op} {b} =\"'")

    def load(self, form: Form) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(train rows, held-out rows) in one of `forms`. UserError for another.

        pairs: the rejected answer is wrong by 1, 2 or 3, and not negative where the right one is not.
        unpaired: the answers of the pair as two rows, so both are on the same side of the division.
        ranked: the right answer, one wrong by 1, one wrong by 2 or 3.
        scored: the answers of the pair as two rows, scored 1 / (1 + how far the answer is off).
        stepwise: two solutions, a right one and one that slips at its sum or at its answer.
        """
        if form not in self.forms:
            raise UserError(
                f"data: arithmetic has {', '.join(self.forms)}, not {form}: type data=jsonl data.path=<file>"
            )
        parts = hold_out(self._problems(), self.heldout, seed=self.seed, key=_twin, name="data.heldout")
        train, heldout = ([row for problem in part for row in self._rows(problem, form)] for part in parts)
        return train, heldout

    @property
    def _total(self) -> int:
        return min(len(self.operations) * (self.high - self.low + 1) ** 2, self.num_problems)

    def _problems(self) -> list[Problem]:
        """Every problem once, shuffled; where there are more than wanted, a draw without replacement."""
        width = self.high - self.low + 1
        drawn = random.Random(self.seed).sample(range(len(self.operations) * width * width), self._total)
        problems = []
        for number in drawn:
            rest, b = divmod(number, width)
            op, a = divmod(rest, width)
            problems.append((self.low + a, self.operations[op], self.low + b))
        return problems

    def _rows(self, problem: Problem, form: Form) -> list[dict[str, Any]]:
        """The row of a problem, or two where its answers are unpaired."""
        a, op, b = problem
        right = a + b if op == "+" else a - b if op == "-" else a * b
        text = self.question.replace("{a}", str(a)).replace("{op}", SIGNS[op]).replace("{b}", str(b))
        row: dict[str, Any] = {"prompt": turn("user", text), "answer": str(right)}
        if form == "prompts":
            return [row]
        best = _said(right)
        if form == "demonstrations":
            return [row | {"completion": best}]
        if form == "ranked":
            near, far = (_said(self._wrong(problem, right, steps)) for steps in ((1,), (2, 3)))
            return [row | {"completions": [best, near, far]}]
        wrong = _said(self._wrong(problem, right, (1, 2, 3)))
        if form == "pairs":
            return [row | {"chosen": best, "rejected": wrong}]
        if form == "scored":
            off = abs(int(wrong[0]["content"]) - right)
            return [row | {"completion": best, "score": 1.0}, row | {"completion": wrong, "score": 1 / (1 + off)}]
        if form == "stepwise":
            return _solutions(row, f"{a} {SIGNS[op]} {b}", str(right), wrong[0]["content"], slip=(a + b) % 2)
        return [row | {"completion": best, "label": True}, row | {"completion": wrong, "label": False}]

    def _wrong(self, problem: Problem, right: int, steps: tuple[int, ...]) -> int:
        """Off by one of `steps`, up or down; not below 0 where the right answer is not."""
        signed = sorted(sign * step for step in steps for sign in (-1, 1))
        near = [right + step for step in signed if right < 0 or right + step >= 0]
        return random.Random(f"{self.seed} {problem}").choice(near)


def _solutions(row: dict[str, Any], task: str, right: str, wrong: str, *, slip: int) -> list[dict[str, Any]]:
    """A right solution in two steps, and one that is wrong from step `slip` on."""
    said = [right if step < slip else wrong for step in range(2)]
    steps = [[f"{task} = {one}", f"The answer is {two}."] for one, two in ((right, right), (said[0], said[1]))]
    labels = [[True, True], [step < slip for step in range(2)]]
    return [row | {"completions": text, "labels": label} for text, label in zip(steps, labels, strict=True)]


def _said(number: int) -> list[dict[str, Any]]:
    return turn("assistant", str(number))


def _twin(problem: Problem) -> str:
    """The same for a + b and b + a."""
    a, op, b = problem
    return f"{min(a, b)}{op}{max(a, b)}" if op in COMMUTATIVE else f"{a}{op}{b}"
