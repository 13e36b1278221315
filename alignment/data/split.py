"""Which rows are held out: chosen by what they ask, so that no held-out prompt is trained on and no order matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from alignment.errors import UserError

T = TypeVar("T")


def content_hash(value: Any, seed: int | None = None) -> str:
    """32 hexadecimal digits of a row's content: the same for equal content, wherever and in which order it comes."""
    text = json.dumps([seed, _plain(value)], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Only what JSON knows; of other objects their numbers or their type, never an address in memory."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {f"{type(key).__name__}:{key}": _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(json.dumps(_plain(item), sort_keys=True) for item in value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if hasattr(value, "tolist"):  # arrays and their scalars
        return _plain(value.tolist())
    if hasattr(value, "isoformat"):  # dates
        return value.isoformat()
    return ["object", type(value).__name__]


def hold_out(
    rows: Sequence[T], share: float | int | None, *, seed: int, key: Callable[[T], str], name: str
) -> tuple[list[T], list[T]]:
    """(train, held out), each in the order of `rows`. Rows with equal `key` (equal prompts) stay together.

    share: a number between 0 and 1 = about that part of the rows; a whole number = about that many; None or 0 = none.
        Whole groups of equal prompts are taken, in the order of a hash, while they fit.
    name: the config key, for the message. UserError where nothing would be left to train on.
    """
    wanted = _count(share, len(rows), name)
    groups: dict[str, int] = {}
    keys = [key(row) for row in rows]
    for value in keys:
        groups[value] = groups.get(value, 0) + 1
    chosen: set[str] = set()
    for value in sorted(groups, key=lambda value: content_hash(value, seed)):
        if groups[value] <= wanted:
            chosen.add(value)
            wanted -= groups[value]
    train = [row for row, value in zip(rows, keys, strict=True) if value not in chosen]
    if rows and not train:
        raise UserError(f"{name}: {share} of {len(rows)} rows leaves none to train on: type {name}=0.1, or more rows")
    return train, [row for row, value in zip(rows, keys, strict=True) if value in chosen]


def _count(share: float | int | None, total: int, name: str) -> int:
    if share is None:
        return 0
    whole = isinstance(share, int)
    if isinstance(share, bool) or not (share >= 0 if whole else 0 <= share < 1):
        raise UserError(f"{name}: {share} is neither a share below 1 nor a number of rows: type {name}=0.1")
    return int(share) if whole else round(share * total)
