"""Which completions are JSON that a schema allows, whatever a policy writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.reward.json_schema import JSONSchema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reward():
    made = JSONSchema(timeout=20)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' {"name": "Ada"}\n', 1.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": "36"}', 0.0),
        ('{"name": "Ada", "city": "London"}', 0.0),
        ('{"name": "Ada",}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('```json\n{"name": "Ada"}\n```', 0.0),  # `block` is off
        ('Here it is: {"name": "Ada"}', 0.0),
        ('{"name": "Ada", "name": "Eve"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": Infinity}', 0.0),
        ('{"name": "Ada", "age": 1e400}', 0.0),
        ('{"name": "Ada", "age": ' + "9" * 5000 + "}", 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 500 + "]" * 500, 0.0),
        ("", 0.0),
        ("true", 0.0),
        ('{"name": "\\ud800"}', 1.0),
        ('{"name": "Ada"', 0.0),
    ],
)
def test_score(reward: JSONSchema, text: str, score: float) -> None:
    assert reward([text], [{"schema": PERSON}]) == [score]


def test_a_schema_of_its_own_in_each_row_and_none(reward: JSONSchema) -> None:
    rows = [{"schema": json.dumps({"type": "integer"})}, {}, {"schema": {"type": "string"}}, {"schema": None}]
    assert reward(["3", "3", "3", "3"], rows) == [1.0, None, 0.0, None]
    assert reward(["3"], [{}]) == [None]


def test_one_schema_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(PERSON))
    reward = JSONSchema(path=str(tmp_path / "s.json"), block=True, reasoning_end="</think>", timeout=20)
    block = '<think>```json\n{"name": 3}\n```</think>so\n```json\n{"name": "Ada"}\n```\nthat is all'
    texts = [block, block.replace("</think>", ""), '</think>{"name": "Ada"}', block.replace('"Ada"', "3")]
    assert reward(texts, [{}] * 4) == [1.0, 0.0, 0.0, 0.0]
    reward.close()


def test_a_pattern_that_takes_for_ever_costs_that_completion() -> None:
    reward = JSONSchema(timeout=1.0)
    rows = [{"schema": {"type": "string", "pattern": "^(a+)+$"}}] * 2
    assert reward([json.dumps("a" * 40 + "b"), '"aaa"'], rows) == [None, 1.0]
    assert reward.counters == {"timeouts": 1, "errors": 0}
    reward.close()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nonsense"}, "column 'schema' of row 5 is no JSON Schema: 'nonsense' is not valid"),
        ("{", "column 'schema' of row 5 is no JSON Schema"),
        ([1], "column 'schema' of row 5 is no JSON Schema: a schema is an object, true or false"),
        ({"$schema": 3}, r"column 'schema' of row 5 is no JSON Schema: \$schema is a text"),
        ({"$ref": "http://localhost:1/x.json"}, "nothing is fetched, and .*localhost:1/x.json is not in the schema"),
    ],
)
def test_what_is_no_schema_is_refused(reward: JSONSchema, schema: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(["3"], [{"schema": schema, "id": 5}])


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" + "0" * 400])
def test_a_number_too_large_to_divide_is_not_valid_and_ends_nothing(reward: JSONSchema, text: str) -> None:
    assert reward([text, "0.5"], [{"schema": {"multipleOf": 0.1}}] * 2) == [0.0, 1.0]


def test_a_reference_within_the_schema(reward: JSONSchema) -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}
    assert reward(["[1, 2]", '["1"]'], [{"schema": schema}] * 2) == [1.0, 0.0]


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.json_schema\.path: there is no file nowhere\.json"):
        JSONSchema(path="nowhere.json")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"s\.json is no JSON Schema"):
        JSONSchema(path=str(tmp_path / "s.json"))
