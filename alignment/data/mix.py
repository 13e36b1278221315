"""Several sources in one set of rows: in given shares, in given numbers, or all of them."""

from __future__ import annotations

import heapq
import inspect
import logging
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from alignment.data.schema import Form, Row
from alignment.data.source import fingerprint
from alignment.data.split import content_hash
from alignment.data.views import View
from alignment.errors import UserError

log = logging.getLogger("alignment")
Rows = Sequence[dict[str, Any]]


class Mix:
    """Rows of several sources. What is held out of each stays held out; the mixture is of the training rows alone.

    sources: name -> source.
    weights: name -> share of the training rows. A source that is not named shares the rest with the others that are
        not, by size; where all are named the numbers count in proportion ({a: 9, b: 1}). 0 = only its held-out rows.
    counts: name -> number of training rows, instead of a weight; a source that is not named gives all it has.
    num_rows: training rows altogether. None with weights: as many as there can be without any coming twice; with
        `repeat`, as many as it takes for all to come once.
    repeat: where a source has fewer rows than it is to give, they come again; without, that is an error.
    seed: which rows of a source are taken. A larger number takes the same rows and more.
    """

    # `problems()` says what is wrong with the numbers; each source is asked about itself.
    checks_itself: ClassVar[bool] = True

    def __init__(
        self,
        *,
        sources: dict[str, Any] | None = None,
        weights: dict[str, float] | None = None,
        counts: dict[str, int] | None = None,
        num_rows: int | None = None,
        repeat: bool = False,
        seed: int = 0,
    ) -> None:
        self.sources, self.weights, self.counts = dict(sources or {}), dict(weights or {}), dict(counts or {})
        self.num_rows, self.repeat, self.seed = num_rows, repeat, seed
        for problem in _problems(self.sources, self.weights, self.counts, num_rows):
            raise UserError(problem)

    def __str__(self) -> str:
        return " + ".join(self.sources)

    @property
    def bad_rows(self) -> Literal["raise", "drop"]:
        """Of rows that cannot be tokenised, when nobody knows their source any more: drop if all sources say so."""
        said = {source.bad_rows for source in self.sources.values() if hasattr(source, "bad_rows")}
        return "drop" if said == {"drop"} else "raise"

    @property
    def drop(self) -> str:
        """What to type for that."""
        names = [name for name, source in self.sources.items() if hasattr(source, "bad_rows")]
        return " ".join(f"data.sources.{name}.bad_rows=drop" for name in names) or "other data"

    def load(self, form: Form) -> tuple[Rows, Rows]:
        """(train rows, held-out rows) in the form, mixed: any stretch has about their shares."""
        parts = {name: self._of(name, lambda source: source.load(form)) for name, source in self.sources.items()}
        sizes = self.sizes({name: len(train) for name, (train, _) in parts.items()})
        picked = {name: self._chosen(name, len(parts[name][0]), size) for name, size in sizes.items()}
        train = [Picked(parts[name][0], places, name) for name, places in picked.items()]
        total = sum(sizes.values())
        if not total:
            raise UserError("data.weights: no row to train on is left: give a source more")
        log.info("mixed: %s", ", ".join(f"{size} of {name} ({size / total:.1%})" for name, size in sizes.items()))
        shares = [size / total for size in sizes.values()]
        return Joined(train, shares), Joined([rows for _, rows in parts.values()], shares)

    def fingerprint(self, form: Form) -> str:
        """Hash of the sources and of how they are mixed."""
        parts = [[name, self._of(name, lambda source: fingerprint(source, form))] for name in self.sources]
        return content_hash([parts, self.weights, self.counts, self.num_rows, self.repeat, self.seed])

    def sizes(self, available: Mapping[str, int]) -> dict[str, int]:
        """Training rows of each source that has so many. UserError where one has too few and none may come twice."""
        if self.counts:
            sizes = {name: self.counts.get(name, number) for name, number in available.items()}
        elif not self.weights and self.num_rows is None:
            sizes = dict(available)
        else:
            shares = self._shares(available)
            ends = [available[name] / share for name, share in shares.items() if share > 0]
            total = self.num_rows or int((max if self.repeat else min)(ends) + 1e-9)
            sizes = apportioned(total, shares)
        for name, size in sizes.items():
            if size > available[name] and not (self.repeat and available[name]):
                key = f"data.counts.{name}" if self.counts else "data.num_rows"
                why = f"{size} rows of {name} are asked for, it has {available[name]} to train on"
                again = " or data.repeat=true, and they come again" if available[name] else ""
                raise UserError(f"{key}: {why}: type {key}=<fewer>{again}")
        return sizes

    def _shares(self, available: Mapping[str, int]) -> dict[str, float]:
        """Share of each source; those without a weight have the rest, by size."""
        given, rest = sum(self.weights.values()), [name for name in available if name not in self.weights]
        if not rest:
            return {name: self.weights[name] / given for name in available}
        size = sum(available[name] for name in rest)
        return {
            name: self.weights.get(name, (1 - given) * available[name] / size if size else 0.0) for name in available
        }

    def _chosen(self, name: str, available: int, size: int) -> Sequence[int]:
        """Which rows of a source: all of them `size // available` times, and a draw of the rest; in their order."""
        whole, rest = divmod(size, available) if available else (0, 0)
        if whole == 1 and not rest:
            return range(available)
        order = array("q", range(available))
        random.Random(f"{self.seed} {name}").shuffle(order)  # pyright: ignore[reportArgumentType]
        times = array("q", [whole]) * available
        for place in order[:rest]:
            times[place] += 1
        return array("q", (place for place in range(available) for _ in range(times[place])))

    def _of(self, name: str, ask: Callable[[Any], Any]) -> Any:
        """What a source says; a problem of it names its own keys, which are one level down here."""
        source = self.sources[name]
        try:
            return ask(source)
        except UserError as error:
            raise UserError(nested(str(error), name, _keys(type(source)))) from error

    @classmethod
    def problems(cls, form: Form, **keys: Any) -> list[str]:
        """What is wrong with weights and counts, before anything is read; types are left to the signature check."""
        sources, weights, counts = (keys.get(name) or {} for name in ("sources", "weights", "counts"))
        tables = all(isinstance(table, Mapping) for table in (sources, weights, counts))
        numbers = tables and all(map(_is_number, (*weights.values(), *counts.values(), keys.get("num_rows") or 0)))
        return list(_problems(sources, weights, counts, keys.get("num_rows"))) if numbers else []


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keys(kind: type) -> set[str]:
    """Names of all keyword arguments of a class, those that it hands to its base included."""
    inits = [cls.__dict__["__init__"] for cls in kind.__mro__ if "__init__" in cls.__dict__ and cls is not object]
    return {name for init in inits for name in inspect.signature(init).parameters} - {"self"}


def nested(message: str, name: str, keys: Iterable[str]) -> str:
    """A source's message with its keys where they are: `data.path` of the source chat is `data.sources.chat.path`."""
    place = f"data.sources.{name}"
    message = re.sub(r"\bdata=(?=\w)", f"data@{place}=", message)
    message = re.sub(rf"\bdata\.(?=(?:{'|'.join(map(re.escape, keys))})\b)", f"{place}.", message)
    return message if place in message else f"{place}: {message}"


def _problems(
    sources: Mapping[str, Any], weights: Mapping[str, float], counts: Mapping[str, int], num_rows: int | None
) -> Iterator[str]:
    if not sources:
        yield "data.sources: there is nothing to mix: type data@data.sources.<name>=<option>, once for each source"
        return
    for key, table in (("weights", weights), ("counts", counts)):
        for name in table:
            if name not in sources:
                yield f"data.{key}.{name}: there is no such source: type one of {', '.join(sources)}"
            elif table[name] < 0:
                yield f"data.{key}.{name}: {table[name]} is below 0: type data.{key}.{name}=0, or more"
    if weights and counts:
        yield "data.counts: a mixture has weights or counts, not both: type data.counts={} or data.weights={}"
    if counts and num_rows is not None:
        yield "data.num_rows: follows from the counts: type data.num_rows=null, or give data.weights"
    if num_rows is not None and num_rows < 1:
        yield f"data.num_rows: {num_rows} is no number of rows: type data.num_rows=null, or 1 or more"
    given, named = sum(weights.values()), set(sources) <= set(weights)
    known = set(weights) <= set(sources) and all(weight >= 0 for weight in weights.values())
    if weights and known and (given <= 0 if named else given >= 1):
        todo = f"type 'data.weights={{{', '.join(f'{name}: {1 / len(sources):.2g}' for name in sources)}}}'"
        what = "nothing is left for the others" if not named else "no source has any"
        yield f"data.weights: they sum to {given:g}, so {what}: {todo}"


# ---- which rows, in which order ------------------------------------------------------------------------------------
def apportioned(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """`total` in whole numbers by share; what rounding down leaves goes to the largest fractions."""
    exact = {name: total * share for name, share in shares.items()}
    sizes = {name: int(number + 1e-9) for name, number in exact.items()}
    for name in sorted(exact, key=lambda name: sizes[name] - exact[name])[: total - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def _spread(part: int, size: int, share: float) -> Iterator[tuple[float, int, int]]:
    """(where it comes in the mixture, part, place in it) of every row of a part: at even distances by its share."""
    return (((place + 0.5) / share if share else float("inf"), part, place) for place in range(size))


class Picked(View):
    """Some rows of a source in a given order. One that comes again has the same `where`: it is meant, no duplicate."""

    def __init__(self, rows: Rows, places: Sequence[int], name: str) -> None:
        self.rows, self.places, self.name = rows, places, name

    def __len__(self) -> int:
        return len(self.places)

    def row(self, index: int) -> Row:
        found = self.rows[self.places[index]]
        row = Row(found)
        row.where = getattr(found, "where", "") or f"{self.name}, row {self.places[index] + 1}"
        return row


class Joined(View):
    """Rows of several parts, each at even distances by its share, so that any beginning is a mixture.

    A part with a share of 0 comes last; the rest of one that is longer than its share allows is at the end.
    """

    def __init__(self, parts: Sequence[Rows], shares: Sequence[float]) -> None:
        self.parts = parts
        # Which part, and which row of it: plain numbers, since a mixture may have millions.
        self.part, self.place = array("H"), array("q")
        spread = [_spread(i, len(part), share) for i, (part, share) in enumerate(zip(parts, shares, strict=True))]
        for _, part, place in heapq.merge(*spread):
            self.part.append(part)
            self.place.append(place)

    def __len__(self) -> int:
        return len(self.place)

    def row(self, index: int) -> Any:
        return self.parts[self.part[index]][self.place[index]]
