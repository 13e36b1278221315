"""Which rows are held out: chosen by what they ask, so that no held-out prompt is trained on and no order matters."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
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
    held = held_out(array("q", (order_of(key(row), seed) for row in rows)), share, name=name)
    train = [row for row, is_held in zip(rows, held, strict=True) if not is_held]
    return train, [row for row, is_held in zip(rows, held, strict=True) if is_held]


def order_of(key: str, seed: int) -> int:
    """Where a group of rows with this key comes when rows are held out: 63 bits of a hash."""
    return int(content_hash(key, seed)[:16], 16) >> 1


def held_out(order: array[int], share: float | int | None, *, name: str) -> bytearray:
    """Of every row, whether it is held out, from the order of its group; otherwise as `hold_out`."""
    wanted = num_held_out(share, len(order), name)
    chosen: set[int] = set()
    for value, group in groupby(sorted(order) if wanted else ()):
        size = sum(1 for _ in group)
        if size <= wanted:
            chosen.add(value)
            wanted -= size
        if not wanted:
            break
    held = bytearray(value in chosen for value in order)
    if order and all(held):
        raise UserError(f"{name}: {share} of {len(order)} rows leaves none to train on: type {name}=0.1, or more rows")
    return held


def num_held_out(share: float | int | None, total: int, name: str) -> int:
    """About how many of `total` rows a share, or a number, means. UserError, naming the key, where it is neither."""
    if share is None:
        return 0
    whole = isinstance(share, int)
    if isinstance(share, bool) or not (share >= 0 if whole else 0 <= share < 1):
        raise UserError(f"{name}: {share} is neither a share below 1 nor a number of rows: type {name}=0.1")
    return int(share) if whole else round(share * total)
