"""Several sources as one: numbers by hand, and each problem said before anything is read."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment import config, rules
from alignment.data.arithmetic import Arithmetic
from alignment.data.jsonl import Jsonl
from alignment.data.mix import Joined, Mix, apportioned, nested
from alignment.errors import UserError
from alignment.validate import validate


class Letters:
    """`size` training rows a0, a1, ... and some held-out ones."""

    def __init__(self, letter: str, size: int, num_heldout: int = 0) -> None:
        self.letter, self.size, self.num_heldout = letter, size, num_heldout

    def load(self, form: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        train = [{"prompt": f"{self.letter}{i}"} for i in range(self.size)]
        return train, [{"prompt": f"{self.letter}-held-{i}"} for i in range(self.num_heldout)]


def prompts(rows: Any) -> list[str]:
    return [row["prompt"] for row in rows]


def counted(rows: Any) -> dict[str, int]:
    return dict(Counter(prompt[0] for prompt in prompts(rows)))


def mix(**keys: Any) -> Mix:
    return Mix(**({"sources": {"a": Letters("a", 100), "b": Letters("b", 30)}} | keys))


def test_without_weights_all_rows_of_all_sources_come_once() -> None:
    train, heldout = mix().load("prompts")
    assert sorted(prompts(train)) == sorted([f"a{i}" for i in range(100)] + [f"b{i}" for i in range(30)])
    assert list(heldout) == []


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        # b is a tenth: 100 of a are nine tenths of 111.1, so 111 rows, of which 99.9 and 11.1.
        ({"weights": {"b": 0.1}}, {"a": 100, "b": 11}),
        # 9 to 1 is the same in proportion.
        ({"weights": {"a": 9, "b": 1}}, {"a": 100, "b": 11}),
        # Half and half: the 30 of b are the limit.
        ({"weights": {"a": 1, "b": 1}}, {"a": 30, "b": 30}),
        ({"weights": {"b": 0.1}, "num_rows": 50}, {"a": 45, "b": 5}),
        # 7 rows in thirds and two thirds: 2.33 and 4.67.
        ({"weights": {"a": 1, "b": 2}, "num_rows": 7}, {"a": 2, "b": 5}),
        ({"weights": {"b": 0}}, {"a": 100, "b": 0}),
        ({"counts": {"b": 5}}, {"a": 100, "b": 5}),
        ({"counts": {"a": 0, "b": 5}}, {"a": 0, "b": 5}),
        # By size: 100 of 130 rows are 76.9 %, of 13 rows that is 10.
        ({"num_rows": 13}, {"a": 10, "b": 3}),
        # Until all have come: 100 of a are half of 200.
        ({"weights": {"a": 1, "b": 1}, "repeat": True}, {"a": 100, "b": 100}),
        ({"counts": {"b": 70}, "repeat": True}, {"a": 100, "b": 70}),
    ],
)
def test_sizes(keys: dict[str, Any], sizes: dict[str, int]) -> None:
    train, _ = mix(**keys).load("prompts")
    assert counted(train) == {name: size for name, size in sizes.items() if size}


def test_without_repeat_no_row_comes_twice_and_with_it_each_comes_as_often_as_the_others_or_once_more() -> None:
    train, _ = mix(counts={"a": 40, "b": 20}).load("prompts")
    assert max(Counter(prompts(train)).values()) == 1
    train, _ = mix(counts={"b": 70}, repeat=True).load("prompts")  # 70 = 2 * 30 + 10
    times = Counter(Counter(p for p in prompts(train) if p[0] == "b").values())
    assert times == {2: 20, 3: 10}


def test_the_same_seed_takes_the_same_rows_and_a_larger_number_takes_them_and_more() -> None:
    few, again, more, other = (
        set(prompts(mix(counts={"a": count, "b": 0}, seed=seed).load("prompts")[0]))
        for count, seed in ((20, 0), (20, 0), (60, 0), (20, 1))
    )
    assert few == again
    assert few < more
    assert few != other


def test_a_draw_is_not_the_beginning_of_the_source() -> None:
    train, _ = mix(counts={"a": 20, "b": 0}).load("prompts")
    assert max(int(p[1:]) for p in prompts(train)) > 50
    assert prompts(train) == sorted(prompts(train), key=lambda p: int(p[1:])), "in the source's order"


def test_any_stretch_of_the_mixture_has_its_shares() -> None:
    train, _ = mix(weights={"a": 4, "b": 1}).load("prompts")
    names = [p[0] for p in prompts(train)]
    assert len(names) == 125
    assert all(names[i : i + 5].count("b") == 1 for i in range(0, 125, 5))


def test_heldout_rows_stay_held_out_and_begin_in_the_shares_of_training() -> None:
    sources = {"a": Letters("a", 100, num_heldout=4), "b": Letters("b", 100, num_heldout=40)}
    train, heldout = Mix(sources=sources, weights={"a": 3, "b": 1}).load("prompts")
    assert not set(prompts(train)) & set(prompts(heldout))
    assert counted(heldout) == {"a": 4, "b": 40}
    # The first four are three of a and one of b, though b has ten times as many.
    assert counted(heldout[:4]) == {"a": 3, "b": 1}


def test_a_source_of_no_share_is_still_measured() -> None:
    sources = {"a": Letters("a", 10, num_heldout=2), "b": Letters("b", 10, num_heldout=2)}
    train, heldout = Mix(sources=sources, weights={"b": 0}).load("prompts")
    assert counted(train) == {"a": 10}
    assert prompts(heldout) == ["a-held-0", "a-held-1", "b-held-0", "b-held-1"]


def test_sequences_are_indexed_from_both_ends_and_sliced() -> None:
    rows = Joined([["x", "y"], ["z"]], [2 / 3, 1 / 3])  # at 0.75, 2.25 and 1.5
    assert list(rows) == ["x", "z", "y"]
    assert rows[-1] == "y"
    assert rows[1:] == ["z", "y"]
    with pytest.raises(IndexError):
        rows[3]


def test_real_sources_keep_their_places_and_the_log_gives_the_shares(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "response": "r"}) + "\n" for i in range(40)))
    sources = {"math": Arithmetic(), "chat": Jsonl(path=str(file), heldout=None)}
    with caplog.at_level(logging.INFO, logger="alignment"):
        train, heldout = Mix(sources=sources, weights={"chat": 0.1}).load("demonstrations")
    # 61 sums are 90 %: 67 rows, 60.3 and 6.7 of them.
    assert "mixed: 60 of math (89.6%), 7 of chat (10.4%)" in caplog.messages
    assert len(heldout) == 20
    assert {row.where.rpartition(":")[0] for row in train if "answer" not in row} == {str(file)}
    assert all(row.where.startswith("math, row ") for row in train if "answer" in row)


def test_apportioned_gives_what_is_left_to_the_largest_fractions() -> None:
    # 10 in 3 : 3 : 1 is 4.29, 4.29, 1.43: 4, 4, 1 and one more for 0.43.
    assert apportioned(10, {"a": 3 / 7, "b": 3 / 7, "c": 1 / 7}) == {"a": 4, "b": 4, "c": 2}


# ---- what cannot be ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        ({"sources": {}}, "data.sources: there is nothing to mix", "data@data.sources.<name>=<option>"),
        ({"weights": {"c": 1}}, "data.weights.c: there is no such source", "type one of a, b"),
        ({"weights": {"a": -1, "b": 2}}, "data.weights.a: -1 is below 0", "data.weights.a=0"),
        ({"counts": {"b": -5}}, "data.counts.b: -5 is below 0", "data.counts.b=0"),
        ({"weights": {"a": 0.5}, "counts": {"b": 5}}, "data.counts: ", "data.counts={}"),
        ({"counts": {"b": 5}, "num_rows": 9}, "data.num_rows: follows", "data.num_rows=null"),
        ({"num_rows": 0}, "data.num_rows: 0 ", "data.num_rows=null"),
        ({"weights": {"a": 1}}, "data.weights: they sum to 1, so nothing is left", "{a: 0.5, b: 0.5}"),
        ({"weights": {"a": 0, "b": 0}}, "data.weights: they sum to 0, so no source has any", "{a: 0.5, b: 0.5}"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_and_when_it_is_built(
    keys: dict[str, Any], start: str, end: str
) -> None:
    whole = {"sources": {"a": {"_target_": "x"}, "b": {"_target_": "y"}}} | keys
    (message,) = Mix.problems("prompts", **whole)
    assert message.startswith(start)
    assert end in message
    with pytest.raises(UserError, match=r"^data\.") as caught:
        mix(**keys)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"counts": {"b": 31}}, "data.counts.b: 31 rows of b are asked for, it has 30 to train on"),
        ({"weights": {"a": 1, "b": 1}, "num_rows": 80}, "data.num_rows: 40 rows of b are asked for, it has 30"),
    ],
)
def test_a_source_that_has_too_few_rows_is_named(keys: dict[str, Any], start: str) -> None:
    with pytest.raises(UserError) as caught:
        mix(**keys).load("prompts")
    assert str(caught.value).startswith(start)
    assert "data.repeat=true" in str(caught.value)


def test_a_problem_of_a_source_names_the_key_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"question": "q"}\n')
    made = Mix(sources={"chat": Jsonl(path=str(file), heldout=None)})
    with pytest.raises(UserError) as caught:
        made.load("demonstrations")
    assert str(caught.value).endswith("data.sources.chat.bad_rows=drop")
    assert "data.bad_rows" not in str(caught.value)


def test_file_names_that_begin_with_data_stay_as_they_are() -> None:
    message = nested("data.jsonl:3: x: type data.path=y or data=hub", "chat", ["path"])
    assert message == "data.jsonl:3: x: type data.sources.chat.path=y or data@data.sources.chat=hub"


# ---- on the command line -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def session() -> Iterator[config.Composer]:
    with config.composer(config.parse([])) as made:
        yield made


CHOICES = ("data=mix", "data@data.sources.math=arithmetic", "data@data.sources.chat=jsonl")


def settled(session: config.Composer, *lines: str) -> tuple[dict[str, Any], list[str]]:
    cfg, whole, problems, _ = session.settle(lines)
    assert cfg is not None
    assert whole is not None
    config._place(whole, None)
    plain, more = config.resolve(cfg)
    return plain, problems + more + validate(plain)


def test_sources_are_chosen_by_name_and_weights_are_one_table(session: config.Composer, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a"}\n')
    words = [f"data.sources.chat.path={tmp_path / 'chat.jsonl'}", "data.weights={chat: 0.1}"]
    plain, problems = settled(session, *CHOICES, *words, "data.sources.math.difficulty=2")
    assert problems == []
    data = plain["data"]
    assert data["weights"] == {"chat": 0.1}
    assert data["sources"]["math"]["difficulty"] == 2
    assert set(data["sources"]["chat"]) > {"path", "heldout", "fields"}
    assert "heldout" not in data, "the keys of rows belong to the source"
    built = config.build(data)
    assert isinstance(built, Mix)
    assert isinstance(built.sources["chat"], Jsonl)


def test_a_plus_before_it_is_as_good(session: config.Composer) -> None:
    plain, _ = settled(session, "data=mix", "+data@data.sources.math=arithmetic")
    assert plain["data"]["sources"]["math"]["_target_"].endswith("Arithmetic")


@pytest.mark.parametrize(
    ("words", "start", "end"),
    [
        (
            ["data.sources.chat.path=nowhere.jsonl"],
            "data.sources.chat.path: there is no file",
            "data.sources.chat.path=",
        ),
        (["data.sources.chat.pth=x"], "data.sources.chat.pth: ", "data.sources.chat.path=x"),
        (["data.sources.cat.path=x"], "data.sources.cat.path: no source is called cat", "data@data.sources.cat="),
        (["data.sources.math.difficulty=two"], "data.sources.math.difficulty: ", "data.sources.math.difficulty="),
        (["data.weights={chta: 0.1}"], "data.weights.chta: ", "type one of math, chat"),
        (["data.wieghts={chat: 0.1}"], "data.wieghts: ", "did you mean data.weights"),
        (["data@data.sources.x=jsnl"], "data: there is no option jsnl", "data=jsonl"),
    ],
)
def test_one_message_for_one_mistake(
    session: config.Composer, tmp_path: Path, words: list[str], start: str, end: str
) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a"}\n')
    path = (
        [] if words[0].startswith("data.sources.chat.path") else [f"data.sources.chat.path={tmp_path / 'chat.jsonl'}"]
    )
    _, problems = settled(session, *CHOICES, *path, *words)
    assert len(problems) == 1, problems
    assert problems[0].startswith(start)
    assert end in problems[0]


def test_bad_rows_of_a_source_are_found_before_a_weight_loads(session: config.Composer, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": ""}\n')
    _, problems = settled(session, *CHOICES, f"data.sources.chat.path={tmp_path / 'chat.jsonl'}")
    assert problems == [
        f"data.sources.chat: {tmp_path / 'chat.jsonl'}:1: prompt: is empty: fill it in, or remove the row"
    ]


def test_only_the_mixture_has_sources(session: config.Composer) -> None:
    _, problems = settled(session, "data@data.sources.math=arithmetic")
    assert problems[0] == "data@data.sources.math=arithmetic: only data=mix has sources by name: type data=mix as well"


def test_a_source_that_lacks_the_form_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toysource.py").write_text('class Prompts:\n    forms = ("prompts",)\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = {
        "algorithm": {"_target_": "alignment.algorithm.dpo.DPO"},
        "data": {"_target_": "alignment.data.mix.Mix", "sources": {"x": {"_target_": "toysource.Prompts"}}},
    }
    (message,) = rules.data_has_form(cfg)
    assert message.startswith("data.sources.x: Prompts has prompts, but DPO learns from pairs")
    assert "type data@data.sources.x=jsonl data.sources.x.path=<file>" in message


def test_tables_are_typed_without_a_plus(session: config.Composer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"task": {"text": "a"}}\n')
    plain, problems = settled(
        session, "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.fields={prompt: task.text}"
    )
    assert problems == []
    assert plain["data"]["fields"] == {"prompt": "task.text"}
