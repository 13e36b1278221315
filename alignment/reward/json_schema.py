"""1 where the completion is JSON that a schema allows, 0 where not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from alignment.errors import UserError
from alignment.reward import answers
from alignment.reward.worker import Guard


class JSONSchema:
    """Valid under a JSON Schema (of any draft that `$schema` names; 2020-12 where it names none), by jsonschema.

    JSON as RFC 8259 has it: NaN, Infinity and a name that stands twice in one object are no JSON. References reach
    within the schema alone, nothing is fetched. Patterns and nesting that take too long cost the completion, not the
    run: checking happens in a process that is killed after `timeout` seconds; that completion is unscorable (None).

    path: JSON file with the schema of all rows; None = each row has its own in `column` (an object, or JSON as text),
        and a row without one is unscorable.
    block: what must be JSON is the content of the last ``` block that is marked json or not at all; False = everything.
    reasoning_end: a closing tag such as "</think>": only what follows the last one counts.
    timeout: seconds for one call. weight: factor of this reward in the total.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        column: str = "schema",
        block: bool = False,
        reasoning_end: str | None = None,
        timeout: float = 5.0,
        weight: float = 1.0,
    ) -> None:
        self.column, self.block, self.reasoning_end, self.weight = column, block, reasoning_end, weight
        self.schema = None if path is None else _from_file(path)
        self._valid = Guard(f"{__name__}:validator", timeout=timeout, name="json_schema")

    def __call__(self, completions: list[str], rows: list[dict[str, Any]]) -> list[float | None]:
        """Scores 1.0, 0.0 or None, one for each completion."""
        schemas = [self.schema or self._of(row, i) for i, row in enumerate(rows)]
        wanted = [i for i, schema in enumerate(schemas) if schema is not None]
        found = self._valid([(self._told(completions[i]), schemas[i]) for i in wanted]) if wanted else []
        scores: list[float | None] = [None] * len(rows)
        for i, score in zip(wanted, found, strict=True):
            scores[i] = score
        return scores

    @property
    def counters(self) -> dict[str, int]:
        return self._valid.counters

    def close(self) -> None:
        """End the process."""
        self._valid.close()

    def _told(self, text: str) -> str | None:
        rest = answers.after(text, self.reasoning_end) if self.reasoning_end else text
        return answers.last_block(rest, ("", "json")) if rest is not None and self.block else rest

    def _of(self, row: dict[str, Any], index: int) -> str | None:
        """The row's schema as JSON. UserError where it is none."""
        value = row.get(self.column)
        return None if value is None else _checked(value, f"column '{self.column}' of row {row.get('id', index)}")


def _from_file(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"reward.json_schema.path: there is no file {file}: type reward.json_schema.path=<schema.json>")
    return _checked(file.read_bytes(), str(file))


def _checked(value: Any, where: str) -> str:
    try:
        schema: Any = json.loads(value) if isinstance(value, (str, bytes)) else value
        if not isinstance(schema, (dict, bool)):
            raise ValueError("a schema is an object, true or false")
        if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
            raise ValueError("$schema is a text")  # jsonschema looks it up before it checks it
        kind: Any = validator_for(schema, jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        for reference in _references(schema):
            if not reference.startswith("#") and f'"$id": "{reference}"' not in json.dumps(schema):
                raise ValueError(f"nothing is fetched, and {reference} is not in the schema")
    except (ValueError, RecursionError, jsonschema.SchemaError) as error:
        said = error.message if isinstance(error, jsonschema.SchemaError) else error
        raise UserError(f"reward.json_schema: {where} is no JSON Schema: {said}") from error
    return json.dumps(schema)


def _references(schema: Any) -> Iterator[str]:
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _references(part)


def validator() -> Callable[[Sequence[tuple[str | None, str]]], list[float]]:
    """Runs in the worker: (text, schema) pairs -> 1.0 or 0.0."""
    return lambda items: [float(text is not None and valid(text, schema)) for text, schema in items]


def valid(text: str, schema: str) -> bool:
    """Whether the text is JSON that the schema allows. UserError for a reference that leads out of the schema."""
    rules = json.loads(schema)
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_refused)
        kind = validator_for(rules, jsonschema.Draft202012Validator)
        return kind(rules, registry=Registry()).is_valid(value)
    # ValueError: also a number of more digits than Python converts; OverflowError: one that is too large to divide
    except (ValueError, OverflowError, RecursionError):
        return False
    except Unresolvable as error:
        raise UserError(f"reward.json_schema: nothing is fetched, and {error} is not in the schema") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
