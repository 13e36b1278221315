"""Datasets that the library has saved or can find in a folder, and what is said where there is no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict

from alignment.data.hub import Hub
from alignment.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(10)
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(name: Path | str, form: Any = "demonstrations", **keys: Any) -> tuple[Any, Any]:
    return Hub(name=str(name), **({"heldout": None} | keys)).load(form)


def contents(rows: list) -> list[str]:
    return [row["completion"][0]["content"] for row in rows]


def test_a_saved_dataset_and_one_with_splits(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    train, held = load(tmp_path / "one")
    assert (contents(train), held) == ([f"a{i}" for i in range(10)], [])
    assert train[2].where == f"{tmp_path / 'one'}[train], row 3"
    parts = {"train": Dataset.from_list(ROWS[:6]), "test": Dataset.from_list(ROWS[6:])}
    DatasetDict(**parts).save_to_disk(str(tmp_path / "two"))
    train, held = load(tmp_path / "two", heldout="test")
    assert (contents(train), contents(held)) == ([f"a{i}" for i in range(6)], [f"a{i}" for i in range(6, 10)])
    train, held = load(tmp_path / "two", split="test", heldout=0.25)
    assert (len(train), len(held)) == (3, 1)


def test_a_folder_of_files_in_the_hubs_layout(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Dataset.from_list(ROWS[:6]).to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    Dataset.from_list(ROWS[6:]).to_parquet(str(tmp_path / "data" / "test-00000-of-00001.parquet"))
    train, held = load(tmp_path, heldout="test")
    assert (len(train), len(held)) == (6, 4)
    with pytest.raises(UserError, match=r"data.heldout: .*train.*: type data.heldout=<one of those>"):
        load(tmp_path, heldout="validation")


def test_nulls_that_the_library_fills_in_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": None}, {"prompt": "q", "answer": "4"}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "x"))
    assert load(tmp_path / "x", "prompts")[0] == rows


def test_bad_rows_are_named_by_split_and_number(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "p"}, {"prompt": ""}]).save_to_disk(str(tmp_path / "x"))
    with pytest.raises(UserError, match=r"x\[train\], row 2: prompt: is empty"):
        load(tmp_path / "x", "prompts")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"heldout": "test"}, r"data.heldout: .* has a single split, not a 'test' .*type data.heldout=0.05"),
        ({"split": "test"}, r"data.split: .* has a single split, not a 'test' .*type data.split=train"),
    ],
)
def test_a_single_split_is_not_taken_for_another(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(UserError, match=words):
        load(tmp_path / "one", **keys)


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    parts = {"train": Dataset.from_list(ROWS)}
    DatasetDict(**parts).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(UserError, match=r"data.split: .* has no split 'test': type data.split=<one of train>"):
        load(tmp_path / "two", split="test")


def test_without_a_network_the_message_says_what_to_do() -> None:
    with pytest.raises(UserError) as caught:
        load("nobody/nothing-of-this-name")
    message = str(caught.value)
    assert message.startswith(
        "data.name: nobody/nothing-of-this-name is no folder, and the hub does not give it (no network"
    )
    assert "type data.name=<folder>, or type data=jsonl data.path=<file>" in message


def test_a_path_that_does_not_exist_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.name: there is no folder /nowhere/at/all"):
        load("/nowhere/at/all")


def test_the_defaults_are_those_of_the_yaml() -> None:
    conf = ROOT / "conf" / "data"
    own = {
        k: v
        for k, v in yaml.safe_load((conf / "hub.yaml").read_text()).items()
        if k not in ("defaults", "_target_", "name")
    }
    assert own == {"config": None, "split": "train", "revision": None}
    shared = yaml.safe_load((conf / "base" / "rows.yaml").read_text())
    assert vars(Hub(name="x", **own, **shared)) == vars(Hub(name="x"))
