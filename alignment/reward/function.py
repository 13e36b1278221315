"""A reward function of the user's own, called as TRL calls one, in a process that can be killed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from alignment.errors import UserError
from alignment.reward.worker import Failed, Guard, load

Item = tuple[str, dict[str, Any]]


class Function:
    """Calls `score(prompts=..., completions=..., **columns)`: every argument a list with one entry per completion.

    The function names those it wants (`def score(completions, answer, **columns)`) and returns a list of as many
    numbers; None = this completion cannot be scored. It runs in a process of its own and sees all completions of one
    scoring at once; where that call overruns, they are scored one by one, so a completion on which it hangs is lost
    alone.

    path: `my_rewards.py:score`, relative to the folder the run is started from, or `package.module:score`.
    timeout: seconds for one call.
    on_error: "raise" ends the run with the function's traceback; "missing" leaves the completions out on which it
        raises, and counts them in `counters["errors"]`.
    messages: True passes a completion of a conversational prompt as TRL does, as [{"role": "assistant", "content":
        ...}]; False passes every completion as text.
    weight: factor of this reward in the total.
    """

    def __init__(
        self,
        *,
        path: str,
        timeout: float = 30.0,
        on_error: Literal["raise", "missing"] = "raise",
        messages: bool = False,
        weight: float = 1.0,
    ) -> None:
        self.name, self.weight = path, weight
        self._score = Guard(
            f"{__name__}:adapter", absolute(path), messages, timeout=timeout, on_error=on_error, name=path
        )
        try:
            self._score.worker.start()
        except Failed as error:
            raise UserError(f"reward.function.path: {error}") from error

    def __call__(self, completions: list[str], rows: list[dict]) -> list[float | None]:
        """What the function returns; RewardSet checks it."""
        return self._score(list(zip(completions, rows, strict=True)))

    @property
    def counters(self) -> dict[str, int]:
        return self._score.counters

    def close(self) -> None:
        """End the function's process."""
        self._score.close()


def absolute(path: str) -> str:
    """The same path from any working directory. UserError where it has no function or the file does not exist."""
    module, colon, name = path.rpartition(":")
    if not colon or not name.isidentifier():
        raise UserError(f"reward.function.path: {path!r} names no function: type reward.function.path=my_file.py:score")
    if not module.endswith(".py"):
        return path
    file = Path(module).expanduser().absolute()
    if not file.is_file():
        raise UserError(f"reward.function.path: there is no file {file}: type reward.function.path=my_file.py:{name}")
    return f"{file}:{name}"


def adapter(path: str, messages: bool) -> Callable[[Sequence[Item]], Any]:
    """Runs in the worker: the user's function, taking (completion, row) pairs."""
    function = load(path)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = {name for name, p in parameters.items() if p.default is p.empty and p.kind not in stars}

    def score(items: Sequence[Item]) -> Any:
        arguments = columns(items, messages)
        if needed - arguments.keys():
            raise TypeError(
                f"{path} asks for {sorted(needed - arguments.keys())}, which the rows do not have: "
                f"it can take {sorted(arguments)}"
            )
        scores = function(**(arguments if takes_all else {n: v for n, v in arguments.items() if n in parameters}))
        return scores.tolist() if hasattr(scores, "tolist") else scores  # arrays and tensors

    return score


def columns(items: Sequence[Item], messages: bool) -> dict[str, list[Any]]:
    """prompts, completions and every column of the rows, each in the order of the completions; None where absent."""
    rows = [row for _, row in items]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion"))
    clash = {"prompts", "completions"} & names.keys()
    if clash:
        raise ValueError(f"the data has columns {sorted(clash)}, which are names of the reward's own arguments: rename")
    prompts = [row.get("prompt") for row in rows]
    completions = [
        [{"role": "assistant", "content": text}] if messages and isinstance(row.get("prompt"), list) else text
        for text, row in items
    ]
    return {"prompts": prompts, "completions": completions} | {name: [row.get(name) for row in rows] for name in names}
