"""From a source of rows to tokenised examples: load, clean, tokenise, and say what became of the rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment.batch import Example
from alignment.data.clean import clean
from alignment.data.encode import Report, encode
from alignment.data.schema import Form

log = logging.getLogger("alignment")


@dataclass
class Prepared:
    """The sets of examples of a run; `reports` has a summary for each, by its name."""

    train: Sequence[Example] = ()
    heldout: Sequence[Example] = ()
    heldout_prompts: Sequence[Example] = ()
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, examples: Sequence[Example], report: Report) -> None:
        setattr(self, name, examples)
        self.reports[name] = report.summary()
        log.info("%s: %s", name.replace("heldout", "held-out").replace("_", " "), report.line())


def prepare(
    source: Any,
    form: Form,
    model: Any,
    *,
    num_prompts: int,
    with_heldout: bool,
    encoding: Mapping[str, Any],
    cleaning: Mapping[str, Any],
) -> Prepared:
    """Examples to learn from in `form`, held-out ones where they have a loss, and the first held-out prompts.

    source: where rows come from. model: whose tokenizer and stop ids they are written with. encoding, cleaning: the
    keyword arguments of `encode` and `clean`. UserError as these raise it.
    """
    options = {"stop_ids": model.stop_ids, **encoding}
    rows, heldout = source.load(form)
    if len(heldout) == 1:
        log.warning("a single row is held out: what is measured on it says little; more are held out by data.heldout")
    prepared = Prepared()
    prompts = source.load("prompts")[1][:num_prompts] if num_prompts else []
    if len(prompts):
        prepared.add("heldout_prompts", *encode(prompts, "prompts", model.tokenizer, **options))
    cleaned = clean(rows, heldout, form, **cleaning)
    examples, report = encode(cleaned.rows, form, model.tokenizer, **options)
    report.add(cleaned.dropped, cleaned.num_conflicts, cleaned.conflict)
    prepared.add("train", examples, report)
    if with_heldout and len(heldout):
        prepared.add("heldout", *encode(heldout, form, model.tokenizer, **options))
    return prepared
