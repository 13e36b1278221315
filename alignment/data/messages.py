"""Conversations and texts as they come, brought to one shape: a list of {"role", "content"} messages, or plain text.

Standard library only: a file of rows can be checked before anything heavy is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Content = str | list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
# ShareGPT's names of the speakers (the `from` of a turn), and those that files in its style have added.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Turns of hh-rlhf, whose conversations are one string.
REPLY = "\n\nAssistant:"


class RowProblem(Exception):
    """What is wrong with one field of one row, and what to do; whoever knows the file and line adds them."""

    def __init__(self, field: str, what: str, todo: str) -> None:
        super().__init__(f"{field}: {what}: {todo}" if field else f"{what}: {todo}")


def shown(value: Any, limit: int = 60) -> str:
    """A value as it appears in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def as_text(value: Any, field: str) -> str:
    """Text that is not blank. RowProblem otherwise."""
    if not isinstance(value, str):
        raise RowProblem(field, f"{shown(value)} is not text", "write text, or a list of messages")
    if not value.strip():
        raise RowProblem(field, "is empty", "fill it in, or remove the row")
    return readable(value, field)


def readable(text: str, field: str) -> str:
    """The text, unless it has half a surrogate pair, which JSON can write and no tokenizer read. RowProblem then."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start + 1} is half a surrogate pair"
        raise RowProblem(field, what, "mend it, or remove the row") from error
    return text


def as_content(value: Any, field: str) -> Content:
    """Text, or messages: a list of turns, or one turn by itself."""
    return as_messages(value, field) if isinstance(value, (list, dict)) else as_text(value, field)


def as_messages(value: Any, field: str) -> list[Message]:
    """Turns in OpenAI's style (role, content) or ShareGPT's (from, value) as {"role", "content"}. RowProblem if none.

    Other keys of a turn (tool_calls, reasoning_content, name) stay; those that are null, as Parquet fills them in, go.
    """
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise RowProblem(field, f"{shown(value)} is no list of messages", "write [{role: user, content: ...}, ...]")
    return [_message(turn, f"{field}[{i}]") for i, turn in enumerate(turns)]


def _message(turn: Any, field: str) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem(field, f"{shown(turn)} is no message", "write {role: ..., content: ...}")
    turn = {key: value for key, value in turn.items() if value is not None}
    if "from" in turn and "role" not in turn:
        speaker = turn.pop("from")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise RowProblem(f"{field}.from", f"{shown(speaker)} is no known speaker", f"use one of {_names(SPEAKERS)}")
        turn = {"role": SPEAKERS[speaker], "content": turn.pop("value", None)} | turn
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        what = "missing" if role is None else f"{shown(role)} is no known role"
        raise RowProblem(f"{field}.role", what, f"use one of {_names(ROLES)}")
    if turn.get("content") is None and role == "assistant" and turn.get("tool_calls"):
        return turn | {"content": ""}
    return turn | {"content": _spoken(turn.get("content"), f"{field}.content")}


def _names(names: Any) -> str:
    return ", ".join(names)


def _spoken(content: Any, field: str) -> str:
    """The text of a turn; OpenAI's list of text parts is joined."""
    if isinstance(content, str):
        return readable(content, field)
    if content is None:
        raise RowProblem(field, "missing", "write the text of the turn")
    if not isinstance(content, list):
        raise RowProblem(field, f"{shown(content)} is not text", "write the text of the turn")
    parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(parts) != len(content):
        raise RowProblem(
            field, "has parts that are not text", "only text can be trained on: leave images and audio out"
        )
    return readable("".join(part["text"] for part in parts), field)


def turn(role: str, content: str) -> list[Message]:
    """One message by itself."""
    return [{"role": role, "content": content}]


def is_learned(message: Message) -> bool:
    """Whether a turn is one to learn: an assistant's, and not excepted by OpenAI's `weight: 0` or by `train: false`."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0 and message.get("train", True) is not False


def as_completion(value: Any, field: str) -> Content:
    """What a model is to say: text, or messages that begin and end with an assistant's turn. RowProblem otherwise."""
    content = as_content(value, field)
    if isinstance(content, list):
        check_completion(content, field)
    return content


def check_completion(messages: list[Message], field: str) -> None:
    """RowProblem unless the messages begin and end with an assistant's turn, and no such turn is empty."""
    for place in (0, len(messages) - 1):
        if messages[place]["role"] != "assistant":
            name, end = f"{field}[{place}].role", "begin" if place == 0 else "end"
            raise RowProblem(name, f"{messages[place]['role']!r}", f"a completion must {end} with an assistant's turn")
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise RowProblem(f"{field}[{place}].content", "is empty", "fill it in, or remove the row")


def as_tools(value: Any) -> list[dict[str, Any]]:
    """Tool schemas as a template takes them; a JSON string is read. RowProblem otherwise."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise RowProblem("tools", f"is not JSON ({error.msg})", "write a list of JSON schemas") from error
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowProblem("tools", f"{shown(value)} is no list of tools", "write a list of JSON schemas")
    return value


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items two sequences have in common from the start."""
    if a[: len(b)] == b[: len(a)]:  # the usual case, without a loop
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)


def split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The turns that two conversations share from the start, and the rest of each. RowProblem where they share none."""
    # Where one conversation is the beginning of the other, its last turn is its completion.
    shared = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if shared == 0:
        raise RowProblem("prompt", "missing, and chosen and rejected share no first turn", "add a prompt field")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def split_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The prompt that two texts begin with, and the rest of each. RowProblem where there is none.

    In texts written as hh-rlhf writes them the prompt ends after the last "Assistant:" they share. In others it is the
    longest common beginning, taken back to the last whole word: half a word at its end would be tokens that no sampled
    prompt has. The space goes to the completions, whose first token then is the one the whole text would have.
    """
    shared = chosen[: shared_length(chosen, rejected)]
    reply = shared.rfind(REPLY)
    if reply >= 0:
        end = reply + len(REPLY)
    else:
        words = [match.start() for match in re.finditer(r"\s+", shared)]
        end = words[-1] if words else 0
    if not shared[:end].strip():
        raise RowProblem("prompt", "missing, and chosen and rejected share no beginning", "add a prompt field")
    rest = chosen[end:], rejected[end:]
    for name, text in zip(("chosen", "rejected"), rest):
        if not text.strip():
            raise RowProblem(
                name, "is nothing but the beginning that both share", "add a prompt field, or remove the row"
            )
    return shared[:end], *rest
