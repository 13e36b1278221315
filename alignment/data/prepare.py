"""From a source of rows to tokenised examples: load, clean, tokenise, and say what became of the rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.batch import Example
from alignment.data import cache
from alignment.data.clean import clean
from alignment.data.encode import Report, Sink, encode
from alignment.data.schema import Form
from alignment.data.source import fingerprint
from alignment.data.store import ExampleWriter
from alignment.errors import UserError

log = logging.getLogger("alignment")
# From so many rows on, examples are kept on disk: fewer are tokenised in a second or two, and fit into memory.
CACHE_FROM = 5_000
ATTEMPTS = 3


@dataclass
class Prepared:
    """The sets of examples of a run; `reports` has a summary for each, by its name."""

    train: Sequence[Example] = ()
    heldout: Sequence[Example] = ()
    heldout_prompts: Sequence[Example] = ()
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is to be made of the rows of a source."""

    form: Form
    num_prompts: int
    with_heldout: bool
    encoding: Mapping[str, Any]
    cleaning: Mapping[str, Any]


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

    Many rows are tokenised once, into files below `cache_root()`, for every later run that would make the same of them.
    """
    plan = Plan(form, num_prompts, with_heldout, encoding, cleaning)
    # Rows that are made on the spot are few, and cost as much to recognise as to make.
    folder = cache.folder_of(_key(source, model, plan)) if hasattr(source, "fingerprint") else None
    if folder and (found := cache.read(folder)):
        return _told(*found, note=f"tokenised before, in {folder}")
    rows, heldout = source.load(form)
    if len(heldout) == 1:
        log.warning("a single row is held out: what is measured on it says little; more are held out by data.heldout")
    if folder is None or len(rows) + len(heldout) < CACHE_FROM:
        sets: dict[str, Any] = {}
        reports = _tokenise(source, rows, heldout, model, plan, lambda name: sets.setdefault(name, []))
        return _told(sets, reports)

    def build(partial: Path) -> dict[str, Any]:
        writers: dict[str, ExampleWriter] = {}
        made = _tokenise(
            source, rows, heldout, model, plan, lambda name: writers.setdefault(name, ExampleWriter(partial / name))
        )
        for writer in writers.values():
            writer.close()
        return made

    for _ in range(ATTEMPTS):
        cache.write(folder, build)
        if found := cache.read(folder):
            return _told(*found, note=f"kept in {folder}")
    raise UserError(f"{folder} cannot be read as it was written: set ALIGNMENT_CACHE to a folder on another disk")


def _key(source: Any, model: Any, plan: Plan) -> dict[str, Any]:
    """Everything that changes the examples. Sources that cannot tell quickly whether they have changed are read."""
    return {
        "rows": fingerprint(source, plan.form),
        "plan": vars(plan),
        "tokenizer": cache.tokenizer_hash(model.tokenizer),
        "stop_ids": sorted(model.stop_ids),
        "versions": cache.code_version(),
    }


def _tokenise(
    source: Any, rows: Any, heldout: Any, model: Any, plan: Plan, sink: Callable[[str], Sink]
) -> dict[str, dict[str, Any]]:
    """Fill a sink for each set of examples; a summary of each, with its line for the log."""
    reports: dict[str, dict[str, Any]] = {}
    options = {"stop_ids": model.stop_ids, "bad_rows": getattr(source, "bad_rows", "raise"), **plan.encoding}
    options["drop"] = getattr(source, "drop", "data=jsonl, of which bad rows can be dropped")

    def add(name: str, chosen: Any, form: Form) -> Report:
        return encode(chosen, form, model.tokenizer, into=sink(name), **options)[1]

    asked = heldout if plan.form == "prompts" else source.load("prompts")[1] if plan.num_prompts else []
    prompts = asked[: plan.num_prompts]
    made: dict[str, Report] = {}
    if len(prompts):
        made["heldout_prompts"] = add("heldout_prompts", prompts, "prompts")
    cleaned = clean(rows, heldout, plan.form, **plan.cleaning)
    made["train"] = add("train", cleaned.rows, plan.form)
    made["train"].add(cleaned.dropped, cleaned.num_conflicts, cleaned.conflict)
    if plan.with_heldout and len(heldout):
        made["heldout"] = add("heldout", heldout, plan.form)
    for name, report in made.items():
        reports[name] = report.summary() | {"line": report.line()}
    return reports


def _told(sets: Mapping[str, Sequence[Example]], reports: Mapping[str, dict[str, Any]], note: str = "") -> Prepared:
    """The result, after its lines in the log."""
    prepared = Prepared(**{name: sets[name] for name in reports})  # pyright: ignore[reportArgumentType]
    for name, report in reports.items():
        prepared.reports[name] = {key: value for key, value in report.items() if key != "line"}
        log.info("%s: %s", name.replace("heldout", "held-out").replace("_", " "), report["line"])
    if note:
        log.info("%d examples %s", sum(map(len, sets.values())), note)
    return prepared
