"""The formats a row may have, recognised from its fields, and the form an algorithm asks for.

`normalise` turns one row into rows of the form; `check_rows` does it for all of them and reports every bad row at once.
The table of formats and conversions is in docs/data.md. Standard library only: a file can be checked before anything
heavy is imported.

| form | fields, beside the extra columns that every row keeps |
|---|---|
| prompts | prompt, answer (where there is one) |
| demonstrations | prompt, completion |
| pairs | prompt, chosen, rejected |
| ranked | prompt, completions (best first) |
| unpaired | prompt, completion, label (bool) |
| scored | prompt, completion, score (a number) |
| stepwise | prompt, completions (the steps, text), labels (a bool each) |

A prompt or completion is text, or a list of {"role", "content"} messages; in one row all are text or all are messages.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.data import messages as talk
from alignment.data.messages import Content, Message, RowProblem, as_completion, as_content, as_text, shown
from alignment.errors import UserError

Form = Literal["prompts", "demonstrations", "pairs", "ranked", "unpaired", "scored", "stepwise"]

# What each format can serve without losing what it says. Ranked lists of two are pairs too.
SERVES: dict[str, tuple[str, ...]] = {
    "preference": ("prompts", "pairs", "ranked", "unpaired"),
    "ranked": ("prompts", "ranked"),
    "stepwise": ("prompts", "stepwise"),
    "unpaired": ("prompts", "unpaired", "scored"),
    "completion": ("prompts", "demonstrations", "scored"),
    "messages": ("prompts", "demonstrations", "scored"),
    "prompt": ("prompts",),
    "text": ("demonstrations",),
}
FORMS = tuple(dict.fromkeys(form for forms in SERVES.values() for form in forms))

# A `prompt` is what the model sees as it stands; under these names it is what a user says.
QUESTIONS = ("question", "problem", "query")
CONVERSATIONS = ("messages", "conversations", "conversation")
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "target")
LABELS = ("label", "kto_tag")
SCORES = ("score", "rating")
TRUTHS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
KNOWN = (
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "completions",
    "labels",
    "text",
    "instruction",
    "response",
    "output",
)
KNOWN += (*QUESTIONS, *CONVERSATIONS, *LABELS)

MAX_SHOWN = 20
# Of rows with the same problem so many are named.
NAMED = 3


class Row(dict[str, Any]):
    """A normalised row. `where` says where it came from, for messages; it is no part of the content."""

    where: str = ""


# A raw row and where it is, or what is wrong there.
Found = tuple[str, dict[str, Any] | RowProblem]


@dataclass(frozen=True)
class Reading:
    """How rows are understood.

    fields: {our name: their column}, a dotted column reaches into a nested one.
    chat: None = text under `prompt` is left as it is, and a question or an instruction is a user's turn; True = all
        text is turned into turns; False = none is.
    system: a system turn for conversational prompts that have none.
    turns: of a `messages` row, which of the assistant's turns are learned as demonstrations.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    chat: bool | None = None
    system: str | None = None
    turns: Literal["all", "last"] = "all"


AS_IT_IS = Reading()


@dataclass
class _Parsed:
    """A row of any format. completions: chosen and rejected, a ranking from the best, steps, or a single one."""

    format: str
    prompt: Content
    completions: list[Content]
    extra: dict[str, Any]
    labels: list[bool] = field(default_factory=list)


# ---- one row -------------------------------------------------------------------------------------------------------
def normalise(row: Mapping[str, Any], form: Form, reading: Reading = AS_IT_IS) -> list[dict[str, Any]]:
    """The rows of `form` in one row: one, or two where a pair becomes unpaired. RowProblem where it cannot serve.

    Fields of the row's format that the form has no use for are left out; every other column is kept.
    """
    if form not in FORMS:
        raise ValueError(f"there is no form {form!r}: {', '.join(FORMS)}")
    parsed = _parse(_renamed(row, reading.fields), reading)
    servable = SERVES[parsed.format] + (
        ("pairs",) if parsed.format == "ranked" and len(parsed.completions) == 2 else ()
    )
    if form not in servable:
        raise _unsuitable(parsed, form)
    if parsed.format == "messages":
        parsed = _conversation(parsed, form, reading.turns)
    return [fields | {k: v for k, v in parsed.extra.items() if k not in fields} for fields in _fields(parsed, form)]


def recognise(row: Mapping[str, Any]) -> str:
    """The format of a row, by the fields that it has (null counts as absent). RowProblem where it has none of them."""
    row = {key: value for key, value in row.items() if value is not None}
    replied = "completion" in row or (_said(row) is not None and not _conversational(row))
    if "chosen" in row and "rejected" in row:
        return "preference"
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if one in row and not replied and not _conversational(row):
            raise RowProblem(
                other, f"missing beside {one}", f"add it, or name its column: data.fields={{{other}: <column>}}"
            )
    if "completions" in row:
        return "stepwise" if "labels" in row else "ranked"
    if _label(row) is not None and (replied or _conversational(row)):
        return "unpaired"
    if replied:
        return "completion"
    if _conversational(row):
        return "messages"
    if _asked(row):
        return "prompt"
    if "text" in row:
        return "text"
    raise RowProblem(
        "prompt", _nothing_known(row), "name the columns: data.fields={prompt: <column>, ...}, see docs/data.md"
    )


def _renamed(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names. A column that was renamed is gone under its own, unless only a part of it was taken."""
    renamed = {key: value for key, value in row.items() if key not in fields.values()}
    for name, column in fields.items():
        value: Any = row
        for part in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise RowProblem(
                    column, "there is no such column", f"data.fields.{name}=<one of {', '.join(map(str, row))}>"
                )
            value = value[part]
        renamed[name] = value
    return renamed


def _conversational(row: Mapping[str, Any]) -> str | None:
    return next((name for name in CONVERSATIONS if name in row), None)


def _asked(row: Mapping[str, Any]) -> str | None:
    """The field that holds the prompt."""
    if "prompt" not in row and isinstance(row.get("context"), list):
        return "context"  # NeMo's ranked lists
    return next((name for name in ("prompt", *QUESTIONS, "instruction") if name in row), None)


def _said(row: Mapping[str, Any]) -> str | None:
    """The field that holds the completion; `output` only beside an instruction, where it cannot mean anything else."""
    names = ("completion", "response", "output") if "instruction" in row else ("completion", "response")
    return next((name for name in names if name in row), None)


def _label(row: Mapping[str, Any]) -> str | None:
    """The field with a label of good or bad; a label that is neither is an extra column."""
    return next((name for name in LABELS if _truth(row.get(name)) is not None), None)


def _truth(value: Any) -> bool | None:
    key = value.strip().lower() if isinstance(value, str) else value
    return TRUTHS.get(key) if isinstance(key, (str, int, float)) else None


def _nothing_known(row: Mapping[str, Any]) -> str:
    near = {name: difflib.get_close_matches(str(name), KNOWN, n=1, cutoff=0.8) for name in row}
    hints = [f" ({name!r} may be a slip for {match[0]!r})" for name, match in near.items() if match]
    return f"missing: the row has {', '.join(map(str, row)) or 'no fields'}" + "".join(hints[:1])


def _parse(row: dict[str, Any], reading: Reading) -> _Parsed:
    present = {key: value for key, value in row.items() if value is not None}
    name = recognise(present)
    used: set[str] = set()
    parsed = _PARSERS[name](present, reading, used)
    parsed.extra = {key: value for key, value in row.items() if key not in used}
    if "tools" in present:
        parsed.extra["tools"] = talk.as_tools(present["tools"])
    options = present.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RowProblem("chat_template_kwargs", f"{shown(options)} is no set of options", "write {name: value, ...}")
    return _agreed(parsed, reading)


def _agreed(parsed: _Parsed, reading: Reading) -> _Parsed:
    """All text or all messages; with the system turn that every conversation is to begin with."""
    if parsed.format == "text":
        return parsed
    if parsed.format == "messages":
        if reading.system is not None:
            parsed.completions = [_with_system(c, reading.system) for c in parsed.completions if isinstance(c, list)]
        return parsed
    # The steps of one solution are pieces of one turn, and stay text.
    replies = [] if parsed.format == "stepwise" else parsed.completions
    if reading.chat or any(isinstance(content, list) for content in (parsed.prompt, *replies)):
        parsed.prompt = parsed.prompt if isinstance(parsed.prompt, list) else talk.turn("user", parsed.prompt)
        if replies:
            parsed.completions = [c if isinstance(c, list) else talk.turn("assistant", c) for c in replies]
    if reading.system is not None and isinstance(parsed.prompt, list):
        parsed.prompt = _with_system(parsed.prompt, reading.system)
    return parsed


def _with_system(messages: list[Message], text: str) -> list[Message]:
    own = messages and messages[0]["role"] in ("system", "developer")
    return messages if own else [*talk.turn("system", text), *messages]


# ---- formats -------------------------------------------------------------------------------------------------------
def _prompt(row: Mapping[str, Any], reading: Reading, used: set[str]) -> Content | None:
    """What the model is asked, None where the row does not say. Beside a completion, a conversation is the prompt."""
    name = _asked(row) or _conversational(row)
    if name is None:
        return None
    used.add(name)
    content = as_content(row[name], name)
    if name == "instruction" and isinstance(content, str):
        content = _with_input(content, row, used)
    if isinstance(content, str) and name in (*QUESTIONS, "instruction") and reading.chat is not False:
        content = talk.turn("user", content)
    content = _with_history(content, row, used)
    if system := _system(row, used):
        content = _with_system(content if isinstance(content, list) else talk.turn("user", content), system)
    return content


def _system(row: Mapping[str, Any], used: set[str]) -> str:
    """The system turn of a row, "" where it has none."""
    text = row.get("system", "")
    if not isinstance(text, str):
        raise RowProblem("system", f"{shown(text)} is not text", "write text, or name the column otherwise")
    used.add("system")
    return talk.readable(text, "system") if text.strip() else ""


def _with_input(instruction: str, row: Mapping[str, Any], used: set[str]) -> str:
    """Alpaca's instruction, with its input below it; Dolly calls the input context."""
    for name in ("input", "context"):
        text = row.get(name, "")
        if not isinstance(text, str):
            raise RowProblem(name, f"{shown(text)} is not text", "write text, or name the column otherwise")
        used.add(name)
        if text.strip():
            return f"{instruction}\n\n{talk.readable(text, name)}"
    return instruction


def _with_history(content: Content, row: Mapping[str, Any], used: set[str]) -> Content:
    """Earlier rounds before an Alpaca instruction: [[instruction, response], ...]."""
    if "history" not in row or "instruction" not in row:
        return content
    used.add("history")
    rounds = row["history"]
    if not isinstance(rounds, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in rounds):
        raise RowProblem("history", f"{shown(rounds)} is no list of rounds", "write [[instruction, response], ...]")
    if not rounds:
        return content
    turns = [
        m
        for ask, reply in rounds
        for m in talk.turn("user", as_text(ask, "history")) + talk.turn("assistant", as_text(reply, "history"))
    ]
    return turns + (content if isinstance(content, list) else talk.turn("user", content))


def _needed_prompt(row: Mapping[str, Any], reading: Reading, used: set[str]) -> Content:
    prompt = _prompt(row, reading, used)
    if prompt is None:
        raise RowProblem("prompt", _nothing_known(row), "add it, or name its column: data.fields={prompt: <column>}")
    return prompt


def _preference(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    prompt = _prompt(row, reading, used)
    used |= {"chosen", "rejected"}
    chosen, rejected = as_content(row["chosen"], "chosen"), as_content(row["rejected"], "rejected")
    if chosen == rejected:
        raise RowProblem("rejected", "is the same as chosen", "remove the row: it prefers nothing")
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt, chosen, rejected = talk.split_text(chosen, rejected) if prompt is None else (prompt, chosen, rejected)
        return _Parsed("preference", prompt, [chosen, rejected], {})
    both = [c if isinstance(c, list) else talk.turn("assistant", c) for c in (chosen, rejected)]
    if both[0] == both[1]:
        raise RowProblem("rejected", "is the same as chosen", "remove the row: it prefers nothing")
    prompt, both = _preferred_messages(prompt, *both)
    for name, completion in zip(("chosen", "rejected"), both):
        talk.check_completion(completion, name)
    return _Parsed("preference", prompt, list(both), {})


def _preferred_messages(
    prompt: Content | None, chosen: list[Message], rejected: list[Message]
) -> tuple[Content, list[list[Message]]]:
    """Prompt and completions, where chosen and rejected may each repeat the prompt's turns."""
    replies = [c[0]["role"] == "assistant" for c in (chosen, rejected)]
    if prompt is not None and all(replies):
        return prompt, [chosen, rejected]
    if prompt in (chosen, rejected):
        prompt = None  # the conversation that UltraFeedback repeats beside the pair
    if isinstance(prompt, list):
        count = len(prompt)
        if chosen[:count] == prompt == rejected[:count] and count < min(len(chosen), len(rejected)):
            return prompt, [chosen[count:], rejected[count:]]
        raise RowProblem(
            "chosen", "neither begins with the prompt nor with an assistant's turn", "mend it, or leave prompt out"
        )
    shared, chosen, rejected = talk.split_messages(chosen, rejected)
    if prompt is not None and prompt not in [message["content"] for message in shared]:
        raise RowProblem("prompt", "is not among the turns that chosen and rejected share", "mend it, or leave it out")
    return shared, [chosen, rejected]


def _ranked(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    prompt = _needed_prompt(row, reading, used)
    used.add("completions")
    items = row["completions"]
    if not isinstance(items, list) or len(items) < 2:
        raise RowProblem("completions", f"{shown(items)} is no list of two or more", "write [best, ..., worst]")
    order = _order(row, items, used)
    texts = [item["completion"] if isinstance(item, dict) and "completion" in item else item for item in items]
    completions = [as_completion(texts[i], f"completions[{i}]") for i in order]
    for i, completion in enumerate(completions):
        if completion in completions[:i]:
            raise RowProblem(
                f"completions[{order[i]}]", "comes twice", "remove one: a list cannot rank it above itself"
            )
    return _Parsed("ranked", prompt, completions, {})


def _order(row: Mapping[str, Any], items: list[Any], used: set[str]) -> list[int]:
    """Positions from best to worst: by `ranks` (the lowest is best) or `scores`, by NeMo's `rank`, or as written."""
    inside = [item.get("rank") for item in items if isinstance(item, dict) and "completion" in item]
    name, sign = "", 1
    values: Any = None
    if "ranks" in row:
        name, values = "ranks", row["ranks"]
    elif "scores" in row:
        name, sign, values = "scores", -1, row["scores"]
    elif inside:
        name, values = "completions.rank", inside
    if values is None:
        return list(range(len(items)))
    used.add(name)
    numbers = isinstance(values, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    if not numbers or len(values) != len(items):
        raise RowProblem(
            name, f"{shown(values)} is no number for each of {len(items)} completions", "give each its own"
        )
    for i, value in enumerate(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise RowProblem(f"{name}[{i}]", f"{value} has no place in an order", "give a finite number")
    if len(set(values)) != len(values):
        raise RowProblem(name, f"{shown(values)} has ties", "a ranking has none: remove one of the completions")
    return sorted(range(len(items)), key=lambda i: sign * values[i])


def _stepwise(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    prompt = _needed_prompt(row, reading, used)
    used |= {"completions", "labels"}
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps:
        raise RowProblem("completions", f"{shown(steps)} is no list of steps", "write [step, ...]")
    steps = [as_text(step, f"completions[{i}]") for i, step in enumerate(steps)]
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise RowProblem(
            "labels", f"{shown(labels)} is no label for each of {len(steps)} steps", "write true or false for each"
        )
    truths = [_truth(label) for label in labels]
    for i, truth in enumerate(truths):
        if truth is None:
            raise RowProblem(f"labels[{i}]", f"{shown(labels[i])} is neither true nor false", "write true or false")
    return _Parsed("stepwise", prompt, list(steps), {}, [bool(truth) for truth in truths])


def _unpaired(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    label = _label(row)
    assert label is not None, "recognise() saw it"
    parsed = _completion(row, reading, used) if _said(row) else _last_reply(row, used)
    used.add(label)
    return _Parsed("unpaired", parsed.prompt, parsed.completions, {}, [bool(_truth(row[label]))])


def _last_reply(row: dict[str, Any], used: set[str]) -> _Parsed:
    """A labelled conversation: the label is of its last turn."""
    return _conversation(_messages(row, AS_IT_IS, used), "demonstrations", "last")


def _completion(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    name = _said(row)
    assert name is not None, "recognise() saw it"
    prompt = _needed_prompt(row, reading, used)
    used.add(name)
    return _Parsed("completion", prompt, [as_completion(row[name], name)], {})


def _messages(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    name = _conversational(row)
    assert name is not None, "recognise() saw it"
    used |= {name, "prompt"}  # beside a whole conversation, a prompt repeats its beginning
    messages = talk.as_messages(row[name], name)
    if system := _system(row, used):
        messages = _with_system(messages, system)
    return _Parsed("messages", "", [messages], {})


def _prompt_only(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    return _Parsed("prompt", _needed_prompt(row, reading, used), [], {})


def _text(row: dict[str, Any], reading: Reading, used: set[str]) -> _Parsed:
    used.add("text")
    return _Parsed("text", "", [as_text(row["text"], "text")], {})


_PARSERS = {
    "preference": _preference,
    "ranked": _ranked,
    "stepwise": _stepwise,
    "unpaired": _unpaired,
    "completion": _completion,
    "messages": _messages,
    "prompt": _prompt_only,
    "text": _text,
}


# ---- forms ---------------------------------------------------------------------------------------------------------
def _conversation(parsed: _Parsed, form: str, turns: str) -> _Parsed:
    """A whole conversation cut in two: before the last reply, or before the first one for `turns="all"`."""
    messages = parsed.completions[0]
    assert isinstance(messages, list)
    roles = [message["role"] for message in messages]
    replies = [i for i, role in enumerate(roles) if role == "assistant" and {*roles[:i]} - {"assistant"}]
    if form == "prompts" and roles[-1] != "assistant":
        return _Parsed("messages", messages, [], parsed.extra)
    if not replies:
        raise RowProblem("messages", "has no assistant's turn after another one", "add the reply, or remove the row")
    first = replies[-1] if turns == "last" or form in ("prompts", "scored") else replies[0]
    while roles[first - 1] == "assistant":
        first -= 1  # a reply in several messages: what comes before them is the prompt
    completion = messages[first : replies[-1] + 1]  # what follows the last reply teaches nothing
    if form != "prompts":
        talk.check_completion(completion, "messages")
    return _Parsed("messages", messages[:first], [completion], parsed.extra)


def _fields(parsed: _Parsed, form: str) -> list[dict[str, Any]]:
    prompt, completions = {"prompt": parsed.prompt}, parsed.completions
    if form == "prompts":
        answer = _answer(parsed)
        return [prompt | ({} if answer is None else {"answer": answer})]
    if form == "pairs":
        return [prompt | {"chosen": completions[0], "rejected": completions[1]}]
    if form == "ranked":
        return [prompt | {"completions": completions}]
    if form == "stepwise":
        return [prompt | {"completions": completions, "labels": parsed.labels}]
    if form == "scored":
        return [prompt | {"completion": completions[0], "score": _score(parsed)}]
    if form == "unpaired":
        labels = parsed.labels or [True, False]  # of a pair: chosen, rejected
        return [prompt | {"completion": c, "label": label} for c, label in zip(completions, labels, strict=True)]
    return [prompt | {"completion": completions[0]}]


def _score(parsed: _Parsed) -> float:
    """How good the completion is: a number of the row, or 1 and 0 for a label."""
    name = next((name for name in SCORES if parsed.extra.get(name) is not None), None)
    if name is None and parsed.labels:
        return float(parsed.labels[0])
    if name is None:
        raise RowProblem("score", "missing", "add it, or name its column: data.fields={score: <column>}")
    try:  # a cell of a CSV file is text
        value = math.nan if isinstance(parsed.extra[name], bool) else float(parsed.extra[name])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise RowProblem(name, f"{shown(parsed.extra[name])} is no finite number", "write a number")
    return value


def _answer(parsed: _Parsed) -> Any:
    """The right answer of a prompt, under any of the names it goes by."""
    extra = parsed.extra
    names = (*ANSWERS, "label") if parsed.format == "prompt" else ANSWERS
    found = next((extra[name] for name in names if extra.get(name) is not None), None)
    if found is None and isinstance(extra.get("reward_model"), Mapping):  # verl
        return extra["reward_model"].get("ground_truth")
    return found


def _fields_of(parsed: _Parsed) -> str:
    words = {
        "preference": "chosen and rejected",
        "ranked": f"a ranking of {len(parsed.completions)} completions",
        "stepwise": "labelled steps",
        "unpaired": "a completion and a label",
        "completion": "a prompt and a completion",
        "messages": "messages",
        "prompt": "a prompt alone",
        "text": "text alone",
    }
    return words[parsed.format]


def _unsuitable(parsed: _Parsed, form: str) -> RowProblem:
    """What is wrong where a format does not serve a form: a label that says nothing, or a field that is not there."""
    label = next((name for name in LABELS if parsed.extra.get(name) is not None), None)
    if form == "unpaired" and parsed.format in ("completion", "messages") and label:
        return RowProblem(label, f"{shown(parsed.extra[label])} is neither true nor false", "write true or false")
    wanted = {"demonstrations": "completion", "pairs": "rejected", "ranked": "completions", "stepwise": "labels"}
    wanted["scored"] = "completion"
    missing = wanted.get(form, "label" if form == "unpaired" else "prompt")
    there = parsed.format in ("unpaired", "stepwise") and form in ("demonstrations", "ranked")
    what = f"a row with {_fields_of(parsed)} cannot serve as {form}"
    return RowProblem("" if there else missing, what if there else f"missing: {what}", _instead(parsed, form))


def _instead(parsed: _Parsed, form: str) -> str:
    """What to do where a format does not serve a form."""
    if parsed.format == "text":
        return "it has no prompt to sample from; for evaluation alone: evaluation.num_prompts=0"
    if form == "demonstrations" and parsed.format == "preference":
        return "to learn the chosen: data.fields={completion: chosen}, or {messages: chosen} if it holds the prompt too"
    if form == "demonstrations" and parsed.format == "prompt":
        named = next((name for name in ANSWERS if parsed.extra.get(name) is not None), None)
        return f"to learn its answers as they are: data.fields={{completion: {named}}}" if named else "add a completion"
    if form == "demonstrations" and parsed.format == "unpaired":
        return "to learn the good ones, keep them in a file of their own, without the label"
    needs = {
        "demonstrations": "prompt and completion, or messages",
        "pairs": "chosen and rejected",
        "ranked": "completions, best first",
        "unpaired": "completion and label (true or false)",
        "scored": "completion and score (a number)",
        "stepwise": "completions and labels, one for each step",
        "prompts": "prompt",
    }
    return f"choose an algorithm for it, or give {needs[form]}"


# ---- all rows ------------------------------------------------------------------------------------------------------
def check_rows(
    found: Iterable[Found], form: Form, reading: Reading = AS_IT_IS, *, bad_rows: Literal["raise", "drop"] = "raise"
) -> tuple[list[Row], list[str]]:
    """Every row in the form, and the problems of those dropped. UserError with all bad rows unless to be dropped."""
    rows: list[Row] = []
    problems: list[str] = []
    for where, raw in found:
        try:
            if isinstance(raw, RowProblem):
                raise raw
            normal = normalise(raw, form, reading)
        except RowProblem as problem:
            problems.append(f"{where}: {problem}")
            continue
        for fields in normal:
            row = Row(fields)
            row.where = where
            rows.append(row)
    if problems and bad_rows == "raise":
        raise UserError(report(problems, form))
    return rows, problems


def report(problems: Sequence[str], form: str, drop: str = "data.bad_rows=drop") -> str:
    """All problems in one text, the first MAX_SHOWN in full."""
    count = len(problems)
    head = "1 row cannot be used" if count == 1 else f"{count} rows cannot be used"
    lines = [f"  - {problem}" for problem in shortened(problems)]
    return "\n".join([f"{head} as {form}:", *lines, f"Mend them, or go on without them: {drop}"])


def shortened(problems: Sequence[str]) -> list[str]:
    """The first MAX_SHOWN, and how many there are besides; what is wrong with many rows is said once."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        where, _, what = problem.partition(": ")
        alike.setdefault(what, []).append(where)
    lines: list[str] = []
    shown = 0
    for problem in problems:
        what = problem.partition(": ")[2]
        places = alike.get(what, [])
        if len(lines) < MAX_SHOWN and places:
            many = len(places) > NAMED
            lines.append(f"{', '.join(places[:NAMED])} and {len(places) - NAMED} more: {what}" if many else problem)
            shown += len(places) if many else 1
            if many:
                del alike[what]
    rest = len(problems) - shown
    return [*lines, *([f"... and {rest} more"] if rest > 0 else [])]


def formats(found: Iterable[Found], reading: Reading) -> Counter[str]:
    """How many rows have which format; rows that have none are left out."""
    counts: Counter[str] = Counter()
    for _, raw in found:
        if not isinstance(raw, RowProblem):
            try:
                counts[recognise(_renamed(raw, reading.fields))] += 1
            except RowProblem:
                counts["unknown"] += 1
    return counts
