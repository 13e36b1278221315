"""Pairs by statistical rejection sampling: scored samples of the starting policy, thinned to the optimal one's."""

from __future__ import annotations

import logging
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from alignment.data.jsonl import Jsonl
from alignment.data.messages import RowProblem, shown
from alignment.data.schema import Form, Found, Row
from alignment.data.split import content_hash
from alignment.data.views import Some
from alignment.errors import UserError

log = logging.getLogger("alignment")


class RSO(Jsonl):
    """RSO (2309.06657): rows with a prompt, `completions` sampled from the policy to train, and their `scores`.

    Of each prompt's samples, in random order, each is accepted with probability exp((score - best) / beta), best being
    the best of those left; accepted ones leave, and further rounds follow until `num_accepted` are found or none is
    left: the first round draws from policy * exp(score / beta), whose DPO loss on pairs of them is consistent. They
    then meet two by two, the higher score is chosen; equal scores and equal texts are no pair.

    A score of null is no score: such a sample is left out. What is drawn depends on `seed` and the row, not on other
    rows. `fields` may rename completions and scores to columns of the row.
    """

    forms: ClassVar[tuple[str, ...]] = ("pairs", "prompts")

    def __init__(self, *, beta: float, num_accepted: int, fields: dict[str, str] | None = None, **common: Any) -> None:
        if not beta > 0:
            raise UserError(f"data.beta: {beta} must be above 0, small is best-of-n: type data.beta=0.5")
        if num_accepted < 2:
            raise UserError(f"data.num_accepted: a pair needs two, not {num_accepted}: type data.num_accepted=8")
        named = dict(fields or {})
        self.columns = [named.pop(name, name) for name in ("completions", "scores")]
        super().__init__(fields=named, **common)
        self.beta, self.num_accepted = beta, num_accepted

    def found(self, where: str | None) -> Iterator[Found]:
        num_rows = num_pairs = num_barren = 0
        for place, row in super().found(where):
            pairs = row if isinstance(row, RowProblem) else self._pairs_or_problem(row)
            if isinstance(pairs, RowProblem):
                yield place, pairs
                continue
            num_rows, num_pairs, num_barren = num_rows + 1, num_pairs + len(pairs), num_barren + (not pairs)
            for pair in pairs:
                yield place, pair
        log.info("%s: %d pairs of %d prompts; %d gave none", self, num_pairs, num_rows, num_barren)

    def content(self) -> str:
        """Of the files, and of what is drawn from them."""
        return content_hash([super().content(), self.beta, self.num_accepted, self.columns])

    def load(self, form: Form) -> tuple[Sequence[Row], Sequence[Row]]:
        train, heldout = super().load(form)
        return (train, heldout) if form != "prompts" else (_once(train), _once(heldout))

    @classmethod
    def problems(cls, form: Form, **keys: Any) -> list[str]:
        try:
            return super().problems(form, **keys)
        except UserError as error:
            return [str(error)]

    def _pairs_or_problem(self, row: dict[str, Any]) -> list[dict[str, Any]] | RowProblem:
        try:
            return self.pairs(row)
        except RowProblem as problem:
            return problem

    def pairs(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The row's pairs, as rows with chosen and rejected. RowProblem where samples or scores are missing."""
        samples = _samples(row, *self.columns)
        rng = random.Random(f"{self.seed} {content_hash(row)}")
        accepted = accept(samples, beta=self.beta, count=self.num_accepted, rng=rng)
        rest = {key: value for key, value in row.items() if key not in self.columns}
        pairs = []
        for one, other in zip(accepted[::2], accepted[1::2], strict=False):
            better, worse = sorted((one, other), key=lambda sample: -sample[1])
            if better[1] > worse[1] and better[0] != worse[0]:
                pairs.append(rest | {"chosen": better[0], "rejected": worse[0]})
        return pairs


Sample = tuple[Any, float]


def accept(samples: Sequence[Sample], *, beta: float, count: int, rng: random.Random) -> list[Sample]:
    """At most `count` of the (completion, score) samples, in the random order in which they were accepted."""
    left, accepted = list(samples), []
    rng.shuffle(left)
    while left and len(accepted) < count:
        best, refused = max(score for _, score in left), []
        for sample in left:
            if len(accepted) < count and rng.random() < math.exp((sample[1] - best) / beta):
                accepted.append(sample)
            else:
                refused.append(sample)
        left = refused
    rng.shuffle(accepted)  # within a round, and over rounds: who meets whom does not follow the order of acceptance
    return accepted


def _samples(row: dict[str, Any], completions: str, scores: str) -> list[Sample]:
    """(completion, score) of every sample that has a score."""
    items, values = row.get(completions), row.get(scores)
    if not isinstance(items, list) or len(items) < 2:
        raise RowProblem(completions, f"{shown(items)} is no list of two or more samples", "sample more of each prompt")
    numbers = isinstance(values, list) and all(
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))
        for value in values
    )
    if not isinstance(values, list) or not numbers or len(values) != len(items):
        raise RowProblem(scores, f"{shown(values)} is no number for each of {len(items)} samples", "give each its own")
    return [(item, float(value)) for item, value in zip(items, values, strict=True) if value is not None]


def _once(rows: Sequence[Row]) -> Sequence[Row]:
    """Each prompt once, where several pairs had it."""
    seen: set[str] = set()
    places = array("q")
    for place, row in enumerate(rows):
        if (key := content_hash(row)) not in seen:
            seen.add(key)
            places.append(place)
    return Some(rows, places)
