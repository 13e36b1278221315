"""Training rows without those that come twice and those that a held-out row gives away, and what contradicts itself."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.data.schema import Form
from alignment.data.split import content_hash
from alignment.data.views import Some
from alignment.errors import UserError

Row = dict[str, Any]

# What of a row, beside its prompt, is learned from; all else may differ between copies. What a prompt is scored by can
# be in any column, so there the whole row counts.
LEARNED: dict[str, tuple[str, ...]] = {
    "demonstrations": ("completion",),
    "pairs": ("chosen", "rejected"),
    "ranked": ("completions",),
    "unpaired": ("completion", "label"),
    "scored": ("completion", "score"),
    "stepwise": ("completions", "labels"),
}
SHOWN = ("prompt", "tools", "chat_template_kwargs")
# Words, and the signs that make another sum of the same numbers; punctuation of sentences is no part of what is asked.
WORD = re.compile(r"\d+(?:[.,]\d+)*|\w+|[^\w\s.,;:!?'\"`´‘’“”…]")
# n-grams of more training rows than this are how people write, not a leak (GPT-3, 2005.14165, appendix C); of few rows,
# those in more than a tenth of them.
COMMON = 10
CHUNK = 1024


@dataclass
class Cleaned:
    """rows: those to train on. dropped: reason -> number. num_conflicts: questions that are answered in two ways."""

    rows: Sequence[Row]
    dropped: Counter[str] = field(default_factory=Counter)
    num_conflicts: int = 0
    conflict: str = ""  # where the first of them is


def clean(
    rows: Sequence[Row],
    heldout: Sequence[Row],
    form: Form,
    *,
    duplicates: Literal["drop", "keep"] = "drop",
    decontaminate: bool = True,
    ngram: int | None = 13,
) -> Cleaned:
    """What is left of the training rows, in their order; the held-out rows stay as they are.

    duplicates: "drop" leaves out a row that equals an earlier one in all that is learned from. A row that a mixture
        takes again on purpose comes from the same place, and stays.
    decontaminate: leave out rows whose prompt is held out but for case, white space and punctuation, and rows that have
        `ngram` words in a row in common with a held-out prompt, completion or answer. What more than ten training rows
        have in common is no leak. System turns do not count. ngram: None = prompts alone.

    UserError where nothing is left.
    """
    if ngram is not None and ngram < 1:
        raise UserError(f"cleaning.ngram: {ngram} is no number of words: type cleaning.ngram=13, or null")
    cleaned = Cleaned(rows)
    kept = torch.ones(len(rows), dtype=torch.bool)
    content, places, questions = _hashes(rows, form)
    if duplicates == "drop":
        kept = _first_of_each(content, places)
        cleaned.dropped["the same as an earlier row"] = int((~kept).sum())
    if questions is not None:
        _find_conflicts(rows, form, content, questions, cleaned)
    if decontaminate and len(heldout):
        _decontaminate(rows, heldout, form, ngram, kept, cleaned.dropped)
    cleaned.dropped = +cleaned.dropped
    if cleaned.dropped:
        cleaned.rows = Some(rows, array("q", kept.nonzero().flatten().tolist()))
    if len(rows) and not len(cleaned.rows):
        why = "; ".join(f"{count} dropped: {reason}" for reason, count in cleaned.dropped.items())
        raise UserError(
            f"of {len(rows)} training rows none is left ({why}): type cleaning.decontaminate=false, or hold out others"
        )
    return cleaned


# ---- what is the same ----------------------------------------------------------------------------------------------
def _number(value: Any) -> int:
    """63 bits of content."""
    return int(content_hash(value)[:16], 16) >> 1


def _hashes(rows: Sequence[Row], form: Form) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of every row: all that is learned from, where it is, and what it answers (None where any answer will do)."""
    content, places, questions = array("q"), array("q"), array("q")
    for number, row in enumerate(rows):
        shown = {name: row.get(name) for name in SHOWN}
        learned = [row.get(name) for name in LEARNED[form]] if form in LEARNED else row
        content.append(_number([shown, learned]))
        where = getattr(row, "where", "")
        places.append(hash(where) if where else number)
        if form != "demonstrations":
            questions.append(_number([shown, _question(row, form)]))
    return _tensor(content), _tensor(places), _tensor(questions) if form != "demonstrations" else None


def _tensor(numbers: array[int]) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.zeros(0, dtype=torch.int64)


def _question(row: Row, form: Form) -> Any:
    """What two rows may not answer differently: which of two is better, whether a completion or a step is good."""
    if form == "pairs":
        return sorted(map(content_hash, (row["chosen"], row["rejected"])))
    if form == "ranked":
        return sorted(map(content_hash, row["completions"]))
    if form in ("unpaired", "scored"):
        return row["completion"]
    return row["completions"] if form == "stepwise" else None


def _groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """(group of each value, place of the first value of each group), the groups of equal values."""
    _, group = torch.unique(values, return_inverse=True)
    first = torch.full((int(group.max()) + 1 if len(group) else 0,), len(values), dtype=torch.int64)
    return group, first.scatter_reduce(0, group, torch.arange(len(values)), "amin")


def _first_of_each(content: Tensor, places: Tensor) -> Tensor:
    """Whether a row is the first with its content, or comes from where that one does."""
    group, first = _groups(content)
    return places == places[first[group]] if len(first) else torch.ones(len(content), dtype=torch.bool)


def _find_conflicts(rows: Sequence[Row], form: Form, content: Tensor, questions: Tensor, cleaned: Cleaned) -> None:
    """Rows that ask the same and say something else. Of prompts, those whose answers differ."""
    group, first = _groups(questions)
    other = content != content[first[group]] if len(first) else torch.zeros(0, dtype=torch.bool)
    asked: set[int] = set()
    for place in other.nonzero().flatten().tolist():
        start = int(first[group[place]])
        if start not in asked and (form != "prompts" or rows[start].get("answer") != rows[place].get("answer")):
            asked.add(start)
            cleaned.conflict = cleaned.conflict or " and ".join(
                getattr(rows[i], "where", "") or f"row {i}" for i in (start, place)
            )
    cleaned.num_conflicts = len(asked)


# ---- what is held out ----------------------------------------------------------------------------------------------
def _decontaminate(
    rows: Sequence[Row], heldout: Sequence[Row], form: Form, ngram: int | None, kept: Tensor, dropped: Counter[str]
) -> None:
    """Take out of `kept` what the held-out rows give away."""
    asked = {hash(tuple(words)) for row in heldout if (words := _words(_prompt(row)))}
    known = _known(heldout, form, ngram) if ngram else torch.zeros(0, dtype=torch.int64)
    hits: list[Tensor] = []
    times = torch.zeros(len(known), dtype=torch.int64)
    common = min(COMMON, max(1, int(kept.sum()) // 10))
    flags = bytes(kept.to(torch.uint8).numpy())
    for chunk in _chunks(((i, rows[i]) for i, flag in enumerate(flags) if flag), CHUNK):
        texts: list[tuple[int, list[str]]] = []
        for number, row in chunk:
            question = _words(_prompt(row))
            if question and hash(tuple(question)) in asked:
                kept[number] = False
                dropped["the prompt is held out"] += 1
            elif len(known):
                texts += [(number, question), *((number, _words(text)) for text in _replies(row, form))]
        if texts and ngram:
            hits.append(_hits(texts, ngram, known, times, common))
    found = torch.cat(hits) if hits else torch.zeros(0, 2, dtype=torch.int64)
    leaks = found[times[found[:, 1]] <= common, 0].unique()
    kept[leaks] = False
    dropped[f"{ngram} words in a row of a held-out row"] += len(leaks)


def _hits(texts: list[tuple[int, list[str]]], ngram: int, known: Tensor, times: Tensor, common: int) -> Tensor:
    """(row, known n-gram) of every pair that occurs, those of n-grams left out that have proved common by now."""
    grams, owners = _grams(texts, ngram)
    at = torch.searchsorted(known, grams).clamp(max=len(known) - 1)
    same = known[at] == grams
    pairs = torch.stack([owners[same], at[same]], dim=1).unique(dim=0)
    times += torch.bincount(pairs[:, 1], minlength=len(times))
    return pairs[times[pairs[:, 1]] <= common]


def _known(heldout: Sequence[Row], form: Form, ngram: int) -> Tensor:
    """Every n-gram of the held-out rows, sorted."""
    found = [
        _grams([(0, _words(text)) for row in chunk for text in (_prompt(row), *_replies(row, form))], ngram)[0].unique()
        for chunk in _chunks(iter(heldout), CHUNK)
    ]
    return torch.cat(found).unique()


def _grams(texts: list[tuple[int, list[str]]], ngram: int) -> tuple[Tensor, Tensor]:
    """A 64-bit hash of every stretch of `ngram` words inside a text, and the text's number. Hashes of this process."""
    lengths = torch.tensor([len(words) for _, words in texts])
    words = _tensor(array("q", (hash(word) for _, text in texts for word in text)))
    owners = torch.tensor([owner for owner, _ in texts]).repeat_interleave(lengths)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    count = max(len(words) - ngram + 1, 0)
    value = torch.zeros(count, dtype=torch.int64)
    for step in range(ngram):
        value = value * 6364136223846793005 + words[step : step + count]  # wraps around: a hash, not a number
    inside = torch.arange(count) + ngram <= ends[:count]
    return value[inside], owners[:count][inside]


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(islice(items, size)):
        yield chunk


# ---- texts ---------------------------------------------------------------------------------------------------------
def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def _text(content: Any) -> str:
    """What is said in a prompt or a completion; a system turn is said to all."""
    if isinstance(content, list):
        return "\n".join(m["content"] for m in content if isinstance(m, dict) and m.get("role") != "system")
    return content if isinstance(content, str) else ""


def _prompt(row: Row) -> str:
    return _text(row.get("prompt"))


def _replies(row: Row, form: Form) -> list[str]:
    """Completions, and the answer where there is one."""
    if form in ("ranked", "stepwise"):
        return [_text(completion) for completion in row["completions"]]
    names = {"prompts": ("answer",), "pairs": ("chosen", "rejected")}.get(form, ("completion", "answer"))
    return [_text(row.get(name)) for name in names]
