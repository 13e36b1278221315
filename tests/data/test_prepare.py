"""Rows become examples once: later they are taken from the cache, if nothing that changes them has changed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from alignment.data import cache, prepare
from alignment.data.arithmetic import Arithmetic
from alignment.data.jsonl import Jsonl
from alignment.data.mix import Mix
from alignment.data.store import ExampleFile
from alignment.errors import UserError

ENCODING = {"max_prompt_tokens": 64, "max_completion_tokens": 64}
Prepare = Callable[..., prepare.Prepared]


@dataclass
class Model:
    tokenizer: PreTrainedTokenizerFast
    stop_ids: set[int] = field(default_factory=set)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """30 rows, one of them a copy; the cache is a folder of the test, and used for this few."""
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "CACHE_FROM", 10)
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"p{i}", "completion": f"c{i}", "n": i}) for i in range(29)]
    file.write_text("\n".join([*lines, lines[3]]) + "\n")
    return file


@pytest.fixture
def model(in_bytes: Callable[..., PreTrainedTokenizerFast]) -> Model:
    return Model(in_bytes())


def prepared(
    source: Any, model: Model, *, form: Any = "demonstrations", encoding: Any = None, cleaning: Any = None
) -> prepare.Prepared:
    options: dict[str, Any] = {"num_prompts": 2, "with_heldout": True, "cleaning": cleaning or {}}
    return prepare.prepare(source, form, model, encoding=ENCODING | (encoding or {}), **options)


def source(file: Path, **keys: Any) -> Jsonl:
    return Jsonl(path=str(file), **({"heldout": 5} | keys))


def entries(file: Path) -> list[Path]:
    folder = file.parent / "cache" / "examples"
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def everything(made: prepare.Prepared) -> tuple[Any, ...]:
    return list(made.train), list(made.heldout), list(made.heldout_prompts), made.reports


def test_the_second_start_takes_the_cache_and_says_so(
    rows: Path, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = everything(prepared(source(rows), model))
    monkeypatch.setattr(Jsonl, "load", lambda *_: pytest.fail("the rows are read again"))
    with caplog.at_level(logging.INFO, logger="alignment"):
        second = prepared(source(rows), model)
    assert everything(second) == first
    assert caplog.messages[-1].startswith(f"{len(first[0]) + len(first[1]) + 2} examples tokenised before, in ")
    assert any(message.startswith("train: ") and "1 dropped: the same as" in message for message in caplog.messages)
    assert second.reports["train"]["dropped"] == {"the same as an earlier row": 1}
    assert "line" not in second.reports["train"]


def test_from_disk_or_from_memory_the_examples_are_the_same(
    rows: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = prepared(source(rows), model)
    assert isinstance(on_disk.train, ExampleFile)
    monkeypatch.setattr(prepare, "CACHE_FROM", 1000)
    monkeypatch.setattr(cache, "read", lambda _: None)
    in_memory = prepared(source(rows), model)
    assert isinstance(in_memory.train, list)
    assert everything(in_memory) == everything(on_disk)


def test_few_rows_and_rows_made_on_the_spot_are_not_kept(
    rows: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(Arithmetic(), model)
    monkeypatch.setattr(prepare, "CACHE_FROM", 31)
    prepared(source(rows), model)
    assert entries(rows) == []


@pytest.mark.parametrize(
    "change",
    [
        {"encoding": {"max_prompt_tokens": 63}},
        {"cleaning": {"duplicates": "keep"}},
        {"form": "prompts"},
        {"heldout": 6},
        {"seed": 1},
        {"system": "Be brief."},
        {"stop_ids": {7}},
        {"template": True},
        {"special": True},
        {"row": True},
        {"file": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_examples_is_another_entry(
    rows: Path, model: Model, in_bytes: Callable[..., PreTrainedTokenizerFast], change: dict[str, Any]
) -> None:
    prepared(source(rows), model)
    keys = {name: change[name] for name in ("heldout", "seed", "system") if name in change}
    options = {name: change[name] for name in ("encoding", "cleaning", "form") if name in change}
    if "row" in change:
        rows.write_text(rows.read_text().replace("c7", "c8"))
    if "template" in change:
        model = Model(in_bytes("{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    if "special" in change:
        model = Model(in_bytes(specials=("<|im_start|>", "<|im_end|>", "<|more|>")))
    if "file" in change:
        rows = rows.rename(rows.with_name("others.jsonl"))
    prepared(source(rows, **keys), Model(model.tokenizer, change.get("stop_ids", set())), **options)
    assert len(entries(rows)) == 2


def test_a_used_tokenizer_has_the_hash_of_a_fresh_one(in_bytes: Callable[..., PreTrainedTokenizerFast]) -> None:
    used = in_bytes()
    used(["a", "bbb"], padding=True, truncation=True, max_length=2)
    assert cache.tokenizer_hash(used) == cache.tokenizer_hash(in_bytes())


def test_a_damaged_entry_is_made_again(rows: Path, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    first = everything(prepared(source(rows), model))
    (entry,) = entries(rows)
    file = entry / "train" / "tokens"
    file.write_bytes(file.read_bytes()[:-4])
    assert everything(prepared(source(rows), model)) == first
    assert "is damaged" in caplog.text
    assert entries(rows) == [entry]
    assert everything(prepared(source(rows), model)) == first


def test_a_start_that_fails_leaves_nothing(rows: Path, model: Model) -> None:
    with pytest.raises(UserError, match="no example is left"):
        prepared(source(rows), model, encoding={"max_length": 2, "truncation": "drop"})
    assert entries(rows) == []
    assert everything(prepared(source(rows), model))[0]


def test_a_mixture_is_kept_too_and_its_weights_count(rows: Path, model: Model) -> None:
    for weight in (0.5, 0.5, 0.2):
        sources = {"math": Arithmetic(), "own": source(rows)}
        made = prepared(Mix(sources=sources, weights={"own": weight}), model)
        assert isinstance(made.train, ExampleFile)
    assert len(entries(rows)) == 2


def _start(file: Path, model: Model, go: Any, answers: Any) -> None:
    go.wait()
    made = prepared(source(file), model)
    answers.put((os.getpid(), [example.prompt_ids for example in made.train]))


def test_two_jobs_at_once_get_the_same(rows: Path, model: Model) -> None:
    context = multiprocessing.get_context("fork")
    go, answers = context.Event(), context.Queue()
    jobs = [context.Process(target=_start, args=(rows, model, go, answers)) for _ in range(2)]
    for job in jobs:
        job.start()
    go.set()
    (one, ids), (other, same) = answers.get(timeout=60), answers.get(timeout=60)
    for job in jobs:
        job.join(timeout=60)
    assert one != other
    assert ids == same
    assert len(entries(rows)) == 1


def test_a_single_held_out_row_is_said(rows: Path, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    prepared(source(rows, heldout=1), model)
    assert "a single row is held out" in caplog.text


def test_one_key_drops_rows_that_only_the_template_refuses(
    rows: Path, in_bytes: Callable[..., PreTrainedTokenizerFast]
) -> None:
    """What a source says of bad rows holds for them too, alone and in a mixture, and the message names its key."""
    strict = "{% for m in messages %}{{ raise_exception('no') if m['content'] == 'p9' else m['content'] }}{% endfor %}"
    model, keys = Model(in_bytes(strict)), {"chat": True, "heldout": None}
    dropped = prepared(source(rows, bad_rows="drop", **keys), model)
    assert dropped.reports["train"]["dropped"]["cannot be used"] == 1
    for made, key in (
        (source(rows, **keys), "data.bad_rows=drop"),
        (Mix(sources={"own": source(rows, **keys), "math": Arithmetic()}), "data.sources.own.bad_rows=drop"),
    ):
        with pytest.raises(UserError, match=f"rows.jsonl:10: .* refuses it \\(no\\)(.|\n)* {key}$"):
            prepared(made, model)
    mixed = Mix(sources={"own": source(rows, bad_rows="drop", **keys), "math": Arithmetic()})
    assert prepared(mixed, model).reports["train"]["dropped"]["cannot be used"] == 1


def test_prompts_are_read_once(rows: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sampled from in evaluation is the beginning of the held-out rows, which are there already."""
    forms: list[str] = []
    load = Jsonl.load
    monkeypatch.setattr(Jsonl, "load", lambda self, form: forms.append(form) or load(self, form))
    made = prepared(source(rows), model, form="prompts")
    assert forms == ["prompts"]
    assert list(made.heldout_prompts) == list(made.heldout)[:2]
