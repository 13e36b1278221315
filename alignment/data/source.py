"""What every source of recorded rows does: read, bring into the form asked for, hold some out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from alignment.data.messages import RowProblem
from alignment.data.schema import Form, Found, Reading, Row, check_rows, formats, normalise, report, shortened
from alignment.data.split import content_hash, hold_out
from alignment.errors import UserError

log = logging.getLogger("alignment")


class RowSource(ABC):
    """Rows of a file or a dataset; `fields`, `chat`, `system` and `turns` are those of `schema.Reading`.

    heldout: text = where the held-out rows are (a file, a split); a share below 1 or a number of rows = taken out of
        the training rows, whole prompts at a time, by `seed` (see `split.hold_out`); None = none.
    bad_rows: "raise" ends with a list of all rows that cannot be used; "drop" goes on without them, and logs them.
    """

    # Whether `problems()` can say what is wrong with the rows without importing anything heavy.
    checks_itself: ClassVar[bool] = False

    def __init__(
        self,
        *,
        heldout: str | float | int | None = 0.05,
        seed: int = 0,
        fields: dict[str, str] | None = None,
        chat: bool | None = None,
        system: str | None = None,
        turns: Literal["all", "last"] = "all",
        bad_rows: Literal["raise", "drop"] = "raise",
    ) -> None:
        self.heldout, self.seed, self.bad_rows = heldout, seed, bad_rows
        self.reading = Reading(dict(fields or {}), chat, system, turns)

    @abstractmethod
    def found(self, where: str | None) -> Iterator[Found]:
        """Every row and where it is: those to train on for None, those of another file or split for its name."""

    def load(self, form: Form) -> tuple[list[Row], list[Row]]:
        """(train rows, held-out rows) in the form. Which rows are held out depends on their prompts, never on the form.

        UserError with every row that cannot be used, or where there is none to train on.
        """
        parts = self._split()
        checked = [check_rows(found, form, self.reading, bad_rows="drop") for found in parts]
        problems = [problem for _, dropped in checked for problem in dropped]
        if problems and self.bad_rows == "raise":
            raise UserError(report(problems, form))
        self._log(problems, [*parts[0], *parts[1]])
        if not checked[0][0]:
            raise UserError(
                f"{self}: no row to train on is left of {len(parts[0])}: choose other data, or mend its rows"
            )
        return checked[0][0], checked[1][0]

    def _split(self) -> tuple[list[Found], list[Found]]:
        train = list(self.found(None))
        if isinstance(self.heldout, str):
            heldout = list(self.found(self.heldout))
            self._warn_of_overlap(train, heldout)
            return train, heldout
        return hold_out(train, self.heldout, seed=self.seed, key=self._key, name="data.heldout")

    def _key(self, found: Found) -> str:
        """Rows with the same prompt have the same key; rows without one are told apart by all they hold."""
        where, row = found
        if isinstance(row, RowProblem):
            return where
        try:
            return content_hash(normalise(row, "prompts", self.reading)[0]["prompt"])
        except RowProblem:
            return content_hash(row)

    def _warn_of_overlap(self, train: Sequence[Found], heldout: Sequence[Found]) -> None:
        known = set(map(self._key, train))
        shared = [where for where, row in heldout if self._key((where, row)) in known]
        if shared:
            log.warning(
                "%s: %d of %d held-out prompts are trained on too (the first: %s); what is measured on them is memory",
                self,
                len(shared),
                len(heldout),
                shared[0],
            )

    def _log(self, problems: Sequence[str], found: Sequence[Found]) -> None:
        counts: Counter[str] = formats(found, self.reading)
        log.info("%s: %s", self, ", ".join(f"{count} rows of format {name}" for name, count in counts.items()))
        if problems:
            text = "\n".join(f"  - {problem}" for problem in shortened(problems))
            log.warning("%s: %d of %d rows dropped:\n%s", self, len(problems), len(found), text)
