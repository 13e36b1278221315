"""What every source of recorded rows does: read, bring into the form asked for, hold some out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from alignment.data.messages import RowProblem
from alignment.data.schema import Form, Found, Reading, Row, formats, normalise, report, shortened
from alignment.data.split import content_hash, held_out, order_of
from alignment.data.spool import Spool
from alignment.data.views import Some
from alignment.errors import UserError

log = logging.getLogger("alignment")


def fingerprint(source: object, form: Form) -> str:
    """Hash of the rows that a source gives. One that makes its rows is asked for them; files are hashed as they are."""
    own = getattr(source, "fingerprint", None)
    return own(form) if own else content_hash([type(source).__qualname__, *map(list, source.load(form))])  # pyright: ignore


class RowSource(ABC):
    """Rows of a file or a dataset; `fields`, `chat`, `system` and `turns` are those of `schema.Reading`.

    heldout: text = where the held-out rows are (a file, a split); a share below 1 or a number of rows = taken out of
        the training rows, whole prompts at a time, by `seed` (see `split.hold_out`); None = none.
    bad_rows: "raise" ends with a list of all rows that cannot be used; "drop" goes on without them, and logs them.
    """

    # Whether `problems()` can say what is wrong with the rows without importing anything heavy.
    checks_itself: ClassVar[bool] = False
    # What to type to go on without bad rows.
    drop: ClassVar[str] = "data.bad_rows=drop"

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

    @abstractmethod
    def content(self) -> str:
        """Hash of what the rows are read from."""

    def fingerprint(self, form: Form) -> str:
        """Hash of what the rows are read from, and of how they are read."""
        return content_hash(
            [type(self).__qualname__, self.content(), self.heldout, self.seed, vars(self.reading), self.bad_rows]
        )

    def load(self, form: Form) -> tuple[Sequence[Row], Sequence[Row]]:
        """(train rows, held-out rows) in the form. Which rows are held out depends on their prompts, never on the form.

        Rows are read one by one and set down in a file: what stays in memory is a few bytes for each.
        UserError with every row that cannot be used, or where there is none to train on.
        """
        train = self._read(form, None)
        parts = [train] + ([self._read(form, self.heldout)] if isinstance(self.heldout, str) else [])
        problems = [problem for part in parts for problem in part.problems]
        if problems and self.bad_rows == "raise":
            raise UserError(report(problems, form))
        self._log(problems, parts)
        if len(parts) == 2:
            self._warn_of_overlap(train, parts[1])
            rows, heldout = train.rows, parts[1].rows
        else:
            held = held_out(train.order, self.heldout, name="data.heldout")  # pyright: ignore[reportArgumentType]
            places = [array("q", (i for i, n in enumerate(train.owner) if held[n] == side)) for side in (False, True)]
            rows, heldout = (Some(train.rows, place) for place in places)
        if not len(rows):
            raise UserError(
                f"{self}: no row to train on is left of {len(train.order)}: choose other data, or mend its rows"
            )
        return rows, heldout

    def _read(self, form: Form, where: str | None) -> _Part:
        part = _Part()
        for place, raw in self.found(where):
            try:
                if isinstance(raw, RowProblem):
                    raise raw
                for fields in normalise(raw, form, self.reading):
                    row = Row(fields)
                    row.where = place
                    part.rows.append(row)
                    part.owner.append(len(part.order))
            except RowProblem as problem:
                part.problems.append(f"{place}: {problem}")
            part.formats.update(formats([(place, raw)], self.reading))
            part.order.append(order_of(self._key((place, raw)), self.seed))
        return part

    def _key(self, found: Found) -> str:
        """Rows with the same prompt have the same key; rows without one are told apart by all they hold."""
        where, row = found
        if isinstance(row, RowProblem):
            return where
        try:
            return content_hash(normalise(row, "prompts", self.reading)[0]["prompt"])
        except RowProblem:
            return content_hash(row)

    def _warn_of_overlap(self, train: _Part, heldout: _Part) -> None:
        shared = set(heldout.order).intersection(train.order)
        both = {n for n, value in enumerate(heldout.order) if value in shared}
        if both:
            first = next((row.where for row, n in zip(heldout.rows, heldout.owner, strict=True) if n in both), "")
            log.warning(
                "%s: %d of %d held-out prompts are among the training rows (first: %s); see cleaning.decontaminate",
                self,
                len(both),
                len(heldout.order),
                first,
            )

    def _log(self, problems: Sequence[str], parts: Sequence[_Part]) -> None:
        counts = sum((part.formats for part in parts), Counter())
        log.info("%s: %s", self, ", ".join(f"{count} rows of format {name}" for name, count in counts.items()))
        if problems:
            text = "\n".join(f"  - {problem}" for problem in shortened(problems))
            total = sum(len(part.order) for part in parts)
            log.warning("%s: %d of %d rows dropped:\n%s", self, len(problems), total, text)


class _Part:
    """What was found in a file or a split.

    rows: those that can be used, in the form. owner: of each, the number of the found row that it is from.
    order: of each found row, where its prompt comes when rows are held out.
    """

    def __init__(self) -> None:
        self.rows, self.owner, self.order = Spool(), array("q"), array("q")
        self.problems: list[str] = []
        self.formats: Counter[str] = Counter()
