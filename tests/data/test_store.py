"""Rows and examples on disk are what was put there, or are refused."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from alignment.batch import Example
from alignment.data import spool
from alignment.data.schema import Row
from alignment.data.spool import Spool
from alignment.data.store import FILES, Damaged, ExampleFile, ExampleWriter


def examples(count: int, group: int = 2, *, masked: bool = False) -> list[Example]:
    draw = random.Random(0)

    def ids(least: int) -> list[int]:
        return [draw.randrange(150_000) for _ in range(draw.randint(least, 9))]

    made = []
    for number in range(count):
        completions = [ids(1) for _ in range(group)]
        masks = [[draw.random() < 0.5 for _ in c] for c in completions] if masked and number % 2 else None
        made.append(Example(ids(1), completions, masks, {"prompt": "é", "n": number, "t": (1, None)}, f"id{number}"))
    return made


def written(folder: Path, rows: list[Example]) -> Path:
    writer = ExampleWriter(folder)
    for row in rows:
        writer.append(row)
    assert len(writer) == len(rows)
    writer.close()
    return folder


@pytest.mark.parametrize("group", [0, 1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_examples_come_back_as_they_were_in_any_order(tmp_path: Path, group: int, masked: bool) -> None:
    rows = examples(20, group, masked=masked)
    found = ExampleFile(written(tmp_path / "x", rows))
    assert list(found) == rows
    assert [found[i] for i in (7, 0, -1)] == [rows[7], rows[0], rows[-1]]
    assert list(found[3:9:2]) == rows[3:9:2]
    with pytest.raises(IndexError):
        found[20]


def test_an_empty_set_is_a_set(tmp_path: Path) -> None:
    assert list(ExampleFile(written(tmp_path / "x", []))) == []


def test_it_travels_to_another_process_and_outlives_its_folder(tmp_path: Path) -> None:
    rows = examples(3)
    found = ExampleFile(written(tmp_path / "x", rows))
    assert list(pickle.loads(pickle.dumps(found))) == rows
    (tmp_path / "x").rename(tmp_path / "y")
    assert list(found) == rows


@pytest.mark.parametrize("name", [*FILES, "meta.json"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_damage_is_seen(tmp_path: Path, name: str, how: str) -> None:
    file = written(tmp_path / "x", examples(5, masked=True)) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content if how == "changed" else content[:-1])
    with pytest.raises(Damaged):
        ExampleFile(tmp_path / "x")


@pytest.mark.parametrize("in_memory", [0, 2**24])
def test_a_spool_gives_rows_back_with_their_place(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    """In a file from the first byte, and in memory."""
    monkeypatch.setattr(spool, "IN_MEMORY", in_memory or 1)
    rows = Spool()
    for number in range(50):
        row = Row({"prompt": "x" * number, "n": number})
        row.where = f"a.jsonl:{number}"
        rows.append(row)
        assert rows[number // 2]["n"] == number // 2, "reading between does not disturb what is added"
    assert [row["n"] for row in rows] == list(range(50))
    assert rows[49].where == "a.jsonl:49"
    assert rows[-1] == {"prompt": "x" * 49, "n": 49}
