"""Content hashes and the choice of held-out rows."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.data.split import content_hash, hold_out
from alignment.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_equal_content_has_equal_hashes_and_other_content_others() -> None:
    same = [{"a": 1, "b": [1, {"c": None}]}, {"b": (1, {"c": None}), "a": 1}]
    assert content_hash(same[0]) == content_hash(same[1])
    different = [1, 1.5, "1", True, None, [1], {"1": 1}, {1: 1}, b"1", {1}, {"a": 1, "b": [1]}, "\ud800"]
    assert len({content_hash(value) for value in different}) == len(different)
    assert content_hash("x", seed=1) != content_hash("x", seed=2)
    assert len(content_hash("x")) == 32


def test_arrays_dates_sets_and_objects_have_hashes_without_addresses() -> None:
    assert content_hash(numpy.array([1, 2])) == content_hash([1, 2])
    assert content_hash(numpy.float64(1.5)) == content_hash(1.5)
    assert content_hash(datetime.date(2026, 1, 2)) == content_hash("2026-01-02")
    assert content_hash({"b", "a", "c"}) == content_hash({"c", "b", "a"})
    assert content_hash(object()) == content_hash(object())


def test_a_hash_is_the_same_in_another_process() -> None:
    code = "from alignment.data.split import content_hash; print(content_hash({'a': {'x', 'y', 'z'}, 'b': 'é'}))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=True
    )
    assert run.stdout.strip() == content_hash({"b": "é", "a": {"z", "y", "x"}})


@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.integers()), min_size=1, max_size=40),
    share=st.floats(0, 0.9) | st.integers(0, 30) | st.none(),
    seed=st.integers(0, 3),
)
def test_rows_are_divided_by_key_in_order_and_never_too_many_held_out(
    rows: list, share: float | None, seed: int
) -> None:
    wanted = 0 if share is None else share if isinstance(share, int) else round(share * len(rows))
    try:
        train, held = hold_out(rows, share, seed=seed, key=lambda row: str(row[0]), name="data.heldout")
    except UserError:
        assert wanted >= len(rows)
        return
    assert not {row[0] for row in train} & {row[0] for row in held}
    assert len(held) <= wanted
    assert sorted(train + held) == sorted(rows)
    assert [row for row in rows if row in train] == train


def test_a_share_that_leaves_nothing_is_refused_with_its_key() -> None:
    with pytest.raises(UserError, match=r"data.heldout: 2 of 2 rows leaves none to train on: type data.heldout=0.1"):
        hold_out(["a", "b"], 2, seed=0, key=str, name="data.heldout")
