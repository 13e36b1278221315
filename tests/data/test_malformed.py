"""Malformed inputs, each with the one problem that is said of it: file, row and field.

Whatever a user can hand in is either read or refused by name: nothing is skipped, guessed or left to fail later.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from alignment.config import parse, preflight
from alignment.data.encode import encode
from alignment.data.jsonl import Jsonl
from alignment.errors import ConfigError, UserError

DEMO = '{"prompt": "p", "completion": "c"}\n'
PAIR = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'
UNPAIRED = '{"prompt": "p", "completion": "c", "label": true}\n'
USER, REPLY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


def row(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


def parquet(*rows: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


# (name of the file, content, form asked for, where, field: "" where no field can be told)
MALFORMED: list[tuple[str, str | bytes, str, str, str]] = [
    # what is in the file is no text, or no rows
    ("cut.jsonl", DEMO * 3 + '{"prompt": "p", "compl', "demonstrations", "cut.jsonl:4", ""),
    ("middle.jsonl", f"{DEMO}{{'prompt': 'p'}}\n{DEMO}", "demonstrations", "middle.jsonl:2", ""),
    ("comma.jsonl", f"{DEMO.strip()},\n{DEMO}", "demonstrations", "comma.jsonl:1", ""),
    ("two.jsonl", DEMO + DEMO.strip() + DEMO, "demonstrations", "two.jsonl:2", ""),
    ("pretty.jsonl", json.dumps(json.loads(DEMO), indent=1), "demonstrations", "pretty.jsonl:1", ""),
    ("list.jsonl", f"{DEMO}[{DEMO.strip()}]\n", "demonstrations", "list.jsonl:2", ""),
    ("zeros.jsonl", DEMO.encode() + bytes(8), "demonstrations", "zeros.jsonl:2", ""),
    ("deep.jsonl", DEMO + "[" * 200_000, "demonstrations", "deep.jsonl:2", ""),
    ("latin.jsonl", DEMO + row(prompt="é", completion="c"), "demonstrations", "latin.jsonl:2", ""),
    ("utf16.jsonl", (DEMO * 2).encode("utf-16"), "demonstrations", "utf16.jsonl", ""),
    ("utf16be.csv", "prompt,completion\np,c\n".encode("utf-16-be"), "demonstrations", "utf16be.csv", ""),
    ("packed.jsonl", gzip.compress(DEMO.encode()), "demonstrations", "packed.jsonl", ""),
    ("cut.jsonl.gz", gzip.compress(DEMO.encode() * 9)[:-20], "demonstrations", "cut.jsonl.gz", ""),
    ("plain.jsonl.gz", DEMO, "demonstrations", "plain.jsonl.gz", ""),
    ("page.jsonl", "<!DOCTYPE html>\n<html>\n", "demonstrations", "page.jsonl", ""),
    ("lfs.jsonl", "version https://git-lfs.github.com/spec/v1\nsize 1\n", "demonstrations", "lfs.jsonl", ""),
    ("text.parquet", DEMO, "demonstrations", "text.parquet", ""),
    ("cut.parquet", parquet({"prompt": "p"})[:-9], "demonstrations", "cut.parquet", ""),
    # a file of another shape
    ("open.json", f"[{DEMO},\n{DEMO}", "demonstrations", "open.json:4", ""),
    ("columns.json", row(prompt=["p", "q"], completion=["c", "d"]), "demonstrations", "columns.json:1", "prompt"),
    ("under.json", row(version=1, data=[{"prompt": "p"}]), "prompts", "under.json:1", "data"),
    ("twice.csv", "prompt,prompt\np,q\n", "prompts", "twice.csv:1", ""),
    ("ragged.csv", "prompt,completion\np,c\nq\n", "demonstrations", "ragged.csv:3", ""),
    ("quote.csv", 'prompt,completion\np,c\nq,"d\n', "demonstrations", "quote.csv:3", ""),
    ("semicolon.csv", "prompt;completion\np;c\n", "demonstrations", "semicolon.csv:1", ""),
    ("latin.csv", b"prompt,completion\np,c\nq,\xe9\n", "demonstrations", "latin.csv:3", ""),
    # fields
    ("empty.jsonl", "{}\n", "demonstrations", "empty.jsonl:1", "prompt"),
    ("slip.jsonl", DEMO + row(promt="p", completion="c"), "demonstrations", "slip.jsonl:2", "prompt"),
    ("null.parquet", parquet(json.loads(DEMO), {"prompt": "q"}), "demonstrations", "null.parquet, row 2", "completion"),
    ("mixed.jsonl", DEMO + PAIR, "demonstrations", "mixed.jsonl:2", "completion"),
    ("mixed2.jsonl", PAIR + DEMO, "pairs", "mixed2.jsonl:2", "rejected"),
    ("names.jsonl", '{"prompt": "p", "prompt": "q"}', "prompts", "names.jsonl:1", "prompt"),
    ("number.jsonl", row(prompt=7, completion="c"), "demonstrations", "number.jsonl:1", "prompt"),
    ("nan.jsonl", '{"prompt": "p", "completion": NaN}', "demonstrations", "nan.jsonl:1", "completion"),
    ("blank.jsonl", DEMO + row(prompt="p", completion=" \n"), "demonstrations", "blank.jsonl:2", "completion"),
    ("digits.jsonl", f'{{"prompt": {"1" * 5000}}}', "prompts", "digits.jsonl:1", ""),
    ("half.jsonl", r'{"prompt": "p", "completion": "\ud83d"}', "demonstrations", "half.jsonl:1", "completion"),
    ("system.jsonl", row(prompt="p", completion="c", system=5), "demonstrations", "system.jsonl:1", "system"),
    ("input.jsonl", row(instruction="i", input=5, output="o"), "demonstrations", "input.jsonl:1", "input"),
    ("round.jsonl", row(instruction="i", history=[["a"]], output="o"), "demonstrations", "round.jsonl:1", "history"),
    ("tools.jsonl", row(messages=[USER, REPLY], tools="{oops"), "demonstrations", "tools.jsonl:1", "tools"),
    (
        "options.jsonl",
        row(messages=[USER, REPLY], chat_template_kwargs="x"),
        "demonstrations",
        "options.jsonl:1",
        "chat_template_kwargs",
    ),
    # turns
    ("role.jsonl", row(messages=[USER | {"role": None}]), "demonstrations", "role.jsonl:1", "messages[0].role"),
    ("bot.jsonl", row(messages=[USER, REPLY | {"role": "bot"}]), "demonstrations", "bot.jsonl:1", "messages[1].role"),
    (
        "from.jsonl",
        row(conversations=[{"from": "alien", "value": "x"}]),
        "demonstrations",
        "from.jsonl:1",
        "conversations[0].from",
    ),
    (
        "value.jsonl",
        row(conversations=[{"from": "human"}]),
        "demonstrations",
        "value.jsonl:1",
        "conversations[0].content",
    ),
    ("nested.jsonl", row(messages=[[USER, REPLY]]), "demonstrations", "nested.jsonl:1", "messages[0]"),
    ("string.jsonl", row(messages=json.dumps([USER])), "demonstrations", "string.jsonl:1", "messages"),
    (
        "image.jsonl",
        row(messages=[USER | {"content": [{"type": "image"}]}, REPLY]),
        "demonstrations",
        "image.jsonl:1",
        "messages[0].content",
    ),
    (
        "tool.jsonl",
        row(messages=[USER, REPLY | {"tool_calls": [{"id": "1"}]}, {"role": "tool"}, REPLY]),
        "demonstrations",
        "tool.jsonl:1",
        "messages[2].content",
    ),
    ("asked.jsonl", row(messages=[USER]), "demonstrations", "asked.jsonl:1", "messages"),
    ("user.jsonl", row(prompt="p", completion=[USER]), "demonstrations", "user.jsonl:1", "completion[0].role"),
    # pairs, labels, ranks, steps
    ("chosen.jsonl", PAIR + row(prompt="p", chosen="", rejected="b"), "pairs", "chosen.jsonl:2", "chosen"),
    ("lone.jsonl", row(prompt="p", chosen="a", rejected=None), "pairs", "lone.jsonl:1", "rejected"),
    ("same.jsonl", PAIR + row(prompt="p", chosen="b", rejected="b"), "pairs", "same.jsonl:2", "rejected"),
    ("same2.jsonl", row(prompt="p", chosen="y", rejected=[REPLY]), "pairs", "same2.jsonl:1", "rejected"),
    ("strangers.jsonl", row(chosen="a", rejected="b"), "pairs", "strangers.jsonl:1", "prompt"),
    ("label.jsonl", UNPAIRED + row(prompt="p", completion="c", label="bad"), "unpaired", "label.jsonl:2", "label"),
    ("label2.jsonl", UNPAIRED + row(prompt="p", completion="c", label=0.5), "unpaired", "label2.jsonl:2", "label"),
    ("label3.jsonl", UNPAIRED + DEMO, "unpaired", "label3.jsonl:2", "label"),
    ("ranked.jsonl", row(prompt="p", completions="ab"), "ranked", "ranked.jsonl:1", "completions"),
    ("ranked2.jsonl", row(prompt="p", completions=["a", None]), "ranked", "ranked2.jsonl:1", "completions[1]"),
    ("ranks.jsonl", row(prompt="p", completions=["a", "b"], ranks=[1]), "ranked", "ranks.jsonl:1", "ranks"),
    (
        "score.jsonl",
        '{"prompt": "p", "completions": ["a", "b"], "scores": [1, NaN]}',
        "ranked",
        "score.jsonl:1",
        "scores[1]",
    ),
    ("ties.jsonl", row(prompt="p", completions=["a", "b"], scores=[1, 1]), "ranked", "ties.jsonl:1", "scores"),
    ("steps.jsonl", row(prompt="p", completions=["a", "b"], labels=[True]), "stepwise", "steps.jsonl:1", "labels"),
    (
        "steps2.jsonl",
        row(prompt="p", completions=["a", "b"], labels=[True, "hm"]),
        "stepwise",
        "steps2.jsonl:1",
        "labels[1]",
    ),
]


def write(name: str, content: str | bytes) -> None:
    text = content.encode("latin-1") if name == "latin.jsonl" and isinstance(content, str) else content
    text = text.replace(rb"\u00e9", b"\xe9") if isinstance(text, bytes) else text.encode()
    Path(name).write_bytes(text)


@pytest.mark.parametrize(("name", "content", "form", "where", "field"), MALFORMED, ids=[case[0] for case in MALFORMED])
def test_one_problem_names_file_row_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, form: Any, where: str, field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(name, content)
    problems = Jsonl.problems(form, path=name, heldout=None)
    assert len(problems) == 1
    place, _, words = problems[0].partition(": ")
    assert place == where
    assert words.startswith(f"{field}: ") if field else ": " in words
    with pytest.raises(UserError) as caught:
        Jsonl(path=name, heldout=None).load(form)
    assert str(caught.value).splitlines()[1:-1] == [f"  - {problems[0]}"]


def test_there_are_more_than_thirty_and_no_two_alike() -> None:
    assert len({case[0] for case in MALFORMED}) == len(MALFORMED) > 30


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.json", "\n"), ("a.json", "[]"), ("a.csv", ""), ("a.csv", "prompt,x\n")]
)
def test_a_file_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(name, content)
    said = f"data.path: {name} has no rows: type data.path=<file, folder or glob>"
    assert Jsonl.problems("prompts", path=name) == [said]


@pytest.mark.parametrize("name", ["cut.jsonl", "utf16.jsonl", "null.parquet", "tool.jsonl"])
def test_nothing_is_started_and_the_command_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, content, _, where, field = next(case for case in MALFORMED if case[0] == name)
    write(name, content)
    with pytest.raises(ConfigError) as caught:
        preflight(parse(["algorithm=sft", "model=tiny", "data=jsonl", f"data.path={name}", "ref_strategy=none"]))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{where}: {field}")
    assert not (tmp_path / "outputs").exists()


def test_a_folder_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "notes.txt").write_text("no rows")
    (problem,) = Jsonl.problems("prompts", path="rows")
    assert problem.startswith("data.path: no .jsonl, ")
    assert problem.endswith(" file is in rows: type data.path=<file, folder or glob>")


def test_lists_of_different_lengths_are_told_where_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", row(prompt="a", completions=["a", "b"]) * 2 + row(prompt="a", completions=["a", "b", "ab"]))
    rows, _ = Jsonl(path="a.jsonl", heldout=None).load("ranked")
    with pytest.raises(UserError, match=r"a.jsonl:3: completions: 3 of them, but 2 rows have 2"):
        encode(rows, "ranked", toy(), max_prompt_tokens=None, max_completion_tokens=None)


def test_a_row_with_nothing_to_learn_is_told_when_it_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bytes: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", row(messages=[USER, REPLY]) + row(messages=[USER, REPLY | {"weight": 0}]))
    rows, _ = Jsonl(path="a.jsonl", heldout=None).load("demonstrations")
    with pytest.raises(UserError) as caught:
        encode(rows, "demonstrations", in_bytes(), max_prompt_tokens=None, max_completion_tokens=None)
    assert str(caught.value).splitlines()[1].startswith("  - a.jsonl:2: completion: has no token to learn")


# ---- what looks malformed and is not ---------------------------------------------------------------------------------
def test_text_that_is_json_stays_text_in_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion may be a list of numbers or an object: only lists of turns are read as messages."""
    monkeypatch.chdir(tmp_path)
    cells = ['"[3, 1, 2]"', '"{""a"": 1}"', '"[{""role"": ""user"", ""content"": ""x""}]"', '"{""k"": [1]}"']
    write("a.csv", f"instruction,output\n{cells[0]},{cells[1]}\n")
    write("b.csv", f"prompt,completion,extra\n{cells[2]},yes,{cells[3]}\n")
    (one,), _ = Jsonl(path="a.csv", heldout=None).load("demonstrations")
    assert one["prompt"][0]["content"] == "[3, 1, 2]"
    assert one["completion"][0]["content"] == '{"a": 1}'
    (two,), _ = Jsonl(path="b.csv", heldout=None).load("demonstrations")
    assert two["prompt"] == [USER]
    assert two["extra"] == {"k": [1]}


def test_one_conversation_may_be_a_whole_json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single list in a single object is a table only where its name is none of a row's."""
    monkeypatch.chdir(tmp_path)
    for indent in (None, 2):
        write("a.json", json.dumps({"messages": [USER, REPLY]}, indent=indent))
        write("b.json", json.dumps({"data": [{"messages": [USER, REPLY]}]}, indent=indent))
        rows = [Jsonl(path=name, heldout=None).load("demonstrations")[0] for name in ("a.json", "b.json")]
        assert rows == [[{"prompt": [USER], "completion": [REPLY]}]] * 2


def test_files_of_old_machines_and_marks_between_joined_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("a.csv", b"prompt,answer\rp,1\rq,2\r")
    write("b.jsonl", b"\xef\xbb\xbf" + DEMO.encode() + b"\xef\xbb\xbf" + DEMO.encode())
    assert Jsonl(path="a.csv", heldout=None).load("prompts")[0] == [
        {"prompt": "p", "answer": "1"},
        {"prompt": "q", "answer": "2"},
    ]
    assert len(Jsonl(path="b.jsonl", heldout=None).load("demonstrations")[0]) == 2
