"""1 where the whole completion has a form, 0 where not: a regular expression, such as one block of reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from alignment.errors import UserError
from alignment.reward.worker import Guard


class Format:
    """Full match of a regular expression with the completion alone; a marker in the prompt earns nothing.

    A pattern can take exponential time on text that a policy finds by itself, and Python cannot interrupt it. So
    matching runs in a process that is killed after `timeout` seconds; that completion is unscorable (None).

    pattern: Python's `re` syntax; `.` matches a newline too.
    weight: factor of this reward in the total.
    """

    def __init__(self, *, pattern: str, timeout: float = 1.0, weight: float = 1.0) -> None:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"reward.format.pattern: {pattern!r} is no regular expression: {error}") from error
        self.weight = weight
        self._match = Guard(f"{__name__}:matcher", pattern, timeout=timeout, name="format")

    def __call__(self, completions: list[str], rows: list[dict]) -> list[float | None]:
        """Scores 1.0, 0.0 or None, one for each completion."""
        return self._match(completions)

    @property
    def counters(self) -> dict[str, int]:
        return self._match.counters

    def close(self) -> None:
        """End the process."""
        self._match.close()


def matcher(pattern: str) -> Callable[[Sequence[str]], list[float]]:
    """Runs in the worker."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda texts: [float(compiled.fullmatch(text) is not None) for text in texts]
