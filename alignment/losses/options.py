"""Choosing one function of a table by name, with exactly the options it can use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def choose(table: Mapping[str, Callable[..., Any]], name: str, **options: Any) -> Callable[..., Any]:
    """`table[name]` with keyword options bound, checked now and not at the first batch.

    An option that the function does not take is refused, unless it is off (None, False or 0): a setting that nothing
    reads would be believed. None also means "the function's own default".
    Raises ValueError naming the option, a needed one that is missing, or the names there are.
    """
    if name not in table:
        raise ValueError(f"{name!r} does not exist: choose from {', '.join(table)}")
    function = table[name]
    usable = {key: p.default for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in usable and value:
            raise ValueError(f"{name} cannot use {option}={value!r}: leave {option} out, or choose another")
    missing = [
        option for option, default in usable.items() if default is inspect.Parameter.empty and option not in given
    ]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}: set it")
    return functools.partial(function, **{option: value for option, value in given.items() if option in usable})
