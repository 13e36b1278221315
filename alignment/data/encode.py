"""Rows in, tokenised examples out, with a report of what was kept, cut and dropped."""

from __future__ import annotations

import bisect
import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from alignment.batch import Example
from alignment.data.messages import RowProblem
from alignment.data.schema import FORMS, Form, report, shortened
from alignment.data.split import content_hash
from alignment.data.template import Rendered, Rewritten, Template, Tokens
from alignment.errors import UserError

log = logging.getLogger("alignment")

# Fields of each form that are completions, in the order of the example's.
COMPLETIONS: dict[str, tuple[str, ...]] = {
    "prompts": (),
    "demonstrations": ("completion",),
    "pairs": ("chosen", "rejected"),
    "unpaired": ("completion",),
    "scored": ("completion",),
}
# Rows that are tokenised in one call: the tokenizers library holds some 100 bytes for each of their tokens meanwhile.
CHUNK = 1024
QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}


class Sink(Protocol):
    """Where examples go: a list, or a file."""

    def append(self, example: Example, /) -> None: ...
    def __len__(self) -> int: ...


@dataclass
class Report:
    """What became of the rows. Lengths are in tokens, before anything is cut; a completion's includes its EOS."""

    form: str
    num_rows: int = 0
    num_examples: int = 0
    # Reason -> number of examples left out for it.
    dropped: Counter[str] = field(default_factory=Counter)
    # Rows whose turns became examples of their own, because the template shows earlier turns otherwise.
    num_split_rows: int = 0
    num_cut_prompts: int = 0
    num_cut_completions: int = 0
    # Questions that training rows answer in ways that exclude each other, and where the first of them is.
    num_conflicts: int = 0
    conflict: str = ""
    prompt_lengths: array[int] = field(default_factory=lambda: array("i"))
    completion_lengths: array[int] = field(default_factory=lambda: array("i"))

    @property
    def cut_share(self) -> float:
        """Share of prompts and completions that were cut, of all that were kept or dropped."""
        total = len(self.prompt_lengths) + len(self.completion_lengths)
        return (self.num_cut_prompts + self.num_cut_completions) / total if total else 0.0

    def add(self, dropped: Counter[str], num_conflicts: int, conflict: str) -> None:
        """Rows that were left out before they were tokenised, and what was found then."""
        self.num_rows += dropped.total()
        self.dropped = dropped + self.dropped
        self.num_conflicts, self.conflict = num_conflicts, conflict

    def summary(self) -> dict[str, Any]:
        """Plain numbers, for a run's records."""
        return {
            "form": self.form,
            "rows": self.num_rows,
            "examples": self.num_examples,
            "dropped": dict(self.dropped),
            "conflicts": self.num_conflicts,
            "split_rows": self.num_split_rows,
            "cut_prompts": self.num_cut_prompts,
            "cut_completions": self.num_cut_completions,
            "cut_share": self.cut_share,
            "prompt_tokens": quantiles(self.prompt_lengths),
            "completion_tokens": quantiles(self.completion_lengths),
        }

    def line(self) -> str:
        """One line for the log."""
        parts = [f"{self.num_examples} examples of {self.num_rows} rows as {self.form}"]
        for name, lengths in (("prompt", self.prompt_lengths), ("completion", self.completion_lengths)):
            if lengths:
                parts.append(f"{name} tokens " + ", ".join(f"{k} {v}" for k, v in quantiles(lengths).items()))
        for name, count, total in (
            ("prompts", self.num_cut_prompts, len(self.prompt_lengths)),
            ("completions", self.num_cut_completions, len(self.completion_lengths)),
        ):
            if count:
                parts.append(f"{count} {name} cut ({count / total:.1%})")
        if self.num_split_rows:
            parts.append(f"{self.num_split_rows} rows became one example for each turn")
        parts += [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        if self.num_conflicts:
            parts.append(f"{self.num_conflicts} questions answered in two ways (the first: {self.conflict})")
        return "; ".join(parts)


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """min, median, p95 and max; the lower of two neighbours, so that each is a length that occurs."""
    counts, total = sorted(Counter(lengths).items()), len(lengths)  # few lengths differ: nothing long is sorted
    ends = list(itertools.accumulate(count for _, count in counts))
    places = {name: int(q * (total - 1)) for name, q in QUANTILES.items()}
    return {name: counts[bisect.bisect_right(ends, place)][0] for name, place in places.items()} if total else {}


@dataclass(frozen=True)
class Limits:
    """How long what may be, in tokens; None = as long as it is."""

    max_prompt_tokens: int | None
    max_completion_tokens: int | None
    max_length: int | None
    truncation: Literal["keep_end", "keep_start", "drop"]


@dataclass
class _Piece:
    """One example in the making."""

    row: dict[str, Any]
    where: str
    rendered: Rendered
    turn: int | None = None  # of a row that was split


def encode(
    rows: Sequence[dict[str, Any]],
    form: Form,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int | None,
    max_completion_tokens: int | None,
    max_length: int | None = None,
    truncation: Literal["keep_end", "keep_start", "drop"] = "keep_end",
    step_separator: str = "\n",
    bad_rows: Literal["raise", "drop"] = "raise",
    drop: str = "data.bad_rows=drop",
    stop_ids: Collection[int] = (),
    into: Sink | None = None,
) -> tuple[Any, Report]:
    """Tokenise rows that are in `form` (see `schema`). Order is kept; ids are hashes of content, never of position.

    First a prompt is cut to max_prompt_tokens on the side that `truncation` says (keep_end drops its beginning, though
    not its BOS), or its row is dropped, and completions are cut at their end to max_completion_tokens. If a prompt and
    its longest completion together are still longer than max_length, the prompt gives way by just that much; where even
    that is not enough, completions are cut instead. A row whose prompt alone fills max_length is dropped: a completion
    is never cut away whole. An uncut completion ends in exactly one EOS that counts, a cut one in none.

    demonstrations: prompt_ids are everything before the first learned token, the completion is the rest.
    ranked: a row must have as many completions as most have; one that has not cannot be used.
    stepwise: each step is followed by `step_separator`, whose last token is what the loss counts; `columns["labels"]`
        are the labels of the steps that are left.
    stop_ids: the model's full stop set, where it has more ends than the tokenizer's EOS.

    into: what examples are appended to and returned as, instead of a new list; rows are taken CHUNK at a time.
    bad_rows: "drop" goes on without rows that cannot be rendered or have nothing to learn, and logs them. drop: what to
        type for that, for the message.

    UserError with all such rows unless they are to be dropped, and where no example is left.
    """
    if form not in FORMS:
        raise ValueError(f"there is no form {form!r}: {', '.join(FORMS)}")
    template = Template(tokenizer, stop_ids)
    limits = Limits(max_prompt_tokens, max_completion_tokens, max_length, truncation)
    _check(limits)
    counts = Report(form, num_rows=len(rows))
    examples: Any = [] if into is None else into
    problems: list[str] = []
    lengths = Counter(len(row["completions"]) for row in rows) if form == "ranked" else Counter()
    for start in range(0, len(rows), CHUNK):
        chunk = _Chunk(rows[start : start + CHUNK], start, lengths)
        for example in _encoded(chunk, template, limits, step_separator, counts, problems):
            examples.append(example)
    if problems and bad_rows == "raise":
        raise UserError(report(problems, form, drop))
    _settle(problems, rows, counts)
    counts.num_examples = len(examples)
    if not len(examples):
        why = "; ".join(f"{count} dropped: {reason}" for reason, count in counts.dropped.items()) or "there were none"
        raise UserError(f"of {len(rows)} rows as {form} no example is left ({why}): raise the limits in encoding.*")
    return examples, counts


@dataclass(frozen=True)
class _Chunk:
    """Some rows, of which the first has the number `start`. lengths: of all ranked lists, and how many there are."""

    rows: Sequence[dict[str, Any]]
    start: int
    lengths: Counter[int]

    def check(self, row: dict[str, Any]) -> None:
        """RowProblem where a ranked list is not as long as most are."""
        if len(self.lengths) > 1:
            usual, count = self.lengths.most_common(1)[0]
            if (length := len(row["completions"])) != usual:
                raise RowProblem(
                    "completions",
                    f"{length} of them, but {count} rows have {usual}",
                    f"give it {usual}, all ranked lists must be equally long",
                )


def _encoded(
    chunk: _Chunk,
    template: Template,
    limits: Limits,
    separator: str,
    counts: Report,
    problems: list[str],
) -> Iterator[Example]:
    """The examples of some rows; what is wrong with the others goes to `problems`."""
    pieces = _render(chunk, counts.form, template, separator, counts, problems)
    for piece, tokens in zip(pieces, template.tokenize([piece.rendered for piece in pieces]), strict=True):
        try:
            closed = _closed(tokens, counts.form, template)
            example = _example(piece, closed, counts.form, limits, template.bos, counts)
        except RowProblem as problem:
            problems.append(f"{piece.where}: {problem}")
            continue
        if example is not None:
            yield example


def _settle(problems: list[str], rows: Sequence[dict[str, Any]], counts: Report) -> None:
    if problems:
        counts.dropped["cannot be used"] += len(problems)
        log.warning("%d of %d rows dropped:\n%s", len(problems), len(rows), "\n".join(shortened(problems)))


def _check(limits: Limits) -> None:
    for name in ("max_prompt_tokens", "max_completion_tokens", "max_length"):
        value, least = getattr(limits, name), 2 if name == "max_length" else 1
        if value is not None and value < least:
            raise UserError(f"encoding.{name}: {value} leaves no room: type encoding.{name}=512")


# ---- rows to text --------------------------------------------------------------------------------------------------
def _render(
    chunk: _Chunk,
    form: str,
    template: Template,
    separator: str,
    counts: Report,
    problems: list[str],
) -> list[_Piece]:
    """Every row as text; what is wrong with those that cannot be shown goes to `problems`."""
    pieces: list[_Piece] = []
    for number, row in enumerate(chunk.rows, chunk.start):
        where = getattr(row, "where", "") or f"row {number}"
        try:
            chunk.check(row)
            pieces += _pieces(row, where, form, template, separator, counts)
        except RowProblem as problem:
            problems.append(f"{where}: {problem}")
    return pieces


def _pieces(
    row: dict[str, Any], where: str, form: str, template: Template, separator: str, counts: Report
) -> list[_Piece]:
    if form == "stepwise":
        return [_Piece(row, where, template.render_steps(row, row["completions"], separator))]
    completions = row["completions"] if form == "ranked" else [row[name] for name in COMPLETIONS[form]]
    try:
        return [_Piece(row, where, template.render(row, completions))]
    except Rewritten:
        if form != "demonstrations":
            raise
        counts.num_split_rows += 1
        turns = template.render_turns(row, completions[0])
        return [_Piece(row, where, rendered, turn) for turn, rendered in enumerate(turns)]


# ---- ids -----------------------------------------------------------------------------------------------------------
def _closed(tokens: Tokens, form: str, template: Template) -> Tokens:
    """Completions with their EOS, a prompt with all before the first learned token. RowProblem where there is none."""
    prompt = tokens.prompt
    if form == "stepwise":
        if not tokens.masks[0] or not tokens.masks[0][-1]:
            raise RowProblem("completions", "the separator has no token", "type encoding.step_separator=<other text>")
        return tokens
    if tokens.inner_stop:
        todo = "remove it, or split the row there: nothing after it could ever be sampled"
        raise RowProblem("completion", f"has an end token ({', '.join(template.stop_texts)}) before its end", todo)
    if not all(any(mask) for mask in tokens.masks):
        todo = "set another model.chat_template, or remove the row"
        raise RowProblem("completion", "has no token to learn as the chat template shows it", todo)
    closed = [template.close(ids, mask) for ids, mask in zip(tokens.completions, tokens.masks, strict=True)]
    if form == "demonstrations":
        ids, mask = closed[0]
        first = max(mask.index(True), 0 if prompt else 1)  # something must come before the first learned token
        prompt, closed = prompt + ids[:first], [(ids[first:], mask[first:])]
    if not prompt:
        raise RowProblem("prompt", "has no token", "fill it in, or remove the row")
    return Tokens(prompt, [ids for ids, _ in closed], [mask for _, mask in closed])


def _example(
    piece: _Piece, tokens: Tokens, form: str, limits: Limits, bos: int | None, counts: Report
) -> Example | None:
    """The example within the limits, None if it is dropped; `counts` is told either way."""
    counts.prompt_lengths.append(len(tokens.prompt))
    counts.completion_lengths.extend(map(len, tokens.completions))
    fitted = fit(tokens.prompt, tokens.completions, limits, bos)
    if isinstance(fitted, str):
        counts.dropped[fitted] += 1
        return None
    prompt, completions = fitted
    if form in ("pairs", "ranked") and any(ids in completions[:i] for i, ids in enumerate(completions)):
        counts.dropped["two completions are the same tokens"] += 1
        return None
    masks = [mask[: len(ids)] for mask, ids in zip(tokens.masks, completions, strict=True)]
    if not all(any(mask) for mask in masks):
        counts.dropped["nothing to learn is left of a cut completion"] += 1
        return None
    counts.num_cut_prompts += len(prompt) < len(tokens.prompt)
    counts.num_cut_completions += sum(len(a) < len(b) for a, b in zip(completions, tokens.completions, strict=True))
    columns = dict(piece.row)
    if form == "stepwise":
        columns["labels"] = list(columns["labels"][: sum(masks[0])])
    whole = all(all(mask) for mask in masks)
    key = content_hash(piece.row) if piece.turn is None else f"{content_hash(piece.row)}-{piece.turn}"
    return Example(prompt, completions, None if whole else masks, columns, key)


# ---- limits --------------------------------------------------------------------------------------------------------
def fit(
    prompt: list[int], completions: list[list[int]], limits: Limits, bos: int | None = None
) -> tuple[list[int], list[list[int]]] | str:
    """Prompt and completions within the limits, as `encode` describes; or the reason why the example is dropped."""
    if limits.max_prompt_tokens is not None and len(prompt) > limits.max_prompt_tokens:
        if limits.truncation == "drop":
            return f"prompt longer than max_prompt_tokens ({limits.max_prompt_tokens})"
        prompt = cut(prompt, limits.max_prompt_tokens, limits.truncation, bos)
    completions = [ids[: limits.max_completion_tokens] for ids in completions]
    longest = max(map(len, completions), default=0)
    if limits.max_length is None or len(prompt) + longest <= limits.max_length:
        return prompt, completions
    if len(prompt) >= limits.max_length:
        return f"prompt fills max_length ({limits.max_length})"
    if longest >= limits.max_length:  # no prompt is short enough: the completions give way instead
        return prompt, [ids[: limits.max_length - len(prompt)] for ids in completions]
    if limits.truncation == "drop":
        return f"prompt and completion longer than max_length ({limits.max_length})"
    return cut(prompt, limits.max_length - longest, limits.truncation, bos), completions


def cut(prompt: list[int], length: int, side: str, bos: int | None) -> list[int]:
    """The first or last `length` tokens of a longer prompt; a BOS at its front stays there."""
    if side == "keep_start":
        return prompt[:length]
    if bos is not None and prompt[0] == bos and length > 1:
        return [bos, *prompt[len(prompt) - length + 1 :]]
    return prompt[len(prompt) - length :]
