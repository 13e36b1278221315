"""Files of every kind, and thirty-odd broken ones: each problem with its file, line and field."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.data.jsonl import PREFLIGHT_ROWS, Jsonl
from alignment.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(20)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(path: Path, form: Any = "prompts", **options: Any) -> tuple[Any, Any]:
    return Jsonl(path=str(path), **({"heldout": None} | options)).load(form)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- kinds of files --------------------------------------------------------------------------------------------------
def test_every_kind_of_file_gives_the_same_rows(folder: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": 'say "hi",\nplease'}], "answer": "1"},
        {"prompt": "p", "answer": "2"},
    ]
    (folder / "a.jsonl").write_text(lines(rows))
    (folder / "b.json").write_text(json.dumps(rows, indent=2))
    (folder / "c.json").write_text(json.dumps({"data": rows}, indent=1))
    (folder / "d.json").write_text(lines(rows))  # JSON Lines under the wrong name
    with open(folder / "e.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "answer"], [json.dumps(rows[0]["prompt"]), "1"], ["p", "2"]])
    (folder / "f.tsv").write_text(
        f"prompt\tanswer\n{json.dumps(rows[0]['prompt']).replace(chr(34), chr(39))}\t1\np\t2\n"
    )
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(lines(rows).encode()))
    (folder / "h.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(rows).replace("\n", "\r\n\r\n").encode())
    for name in ("a.jsonl", "b.json", "c.json", "d.json", "e.csv", "g.jsonl.gz", "h.jsonl"):
        assert load(folder / name)[0] == rows, name
    assert load(folder / "f.tsv")[0][1] == rows[1]


def test_parquet_with_the_nulls_it_fills_in(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "messages": [
                {"role": "user", "content": "q", "name": "me"},
                {"role": "assistant", "content": "a", "name": None},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "q2", "name": None},
                {"role": "assistant", "content": "", "name": None},
            ]
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    assert load(folder / "x.parquet", "prompts")[0] == [
        {"prompt": [{"role": "user", "content": "q", "name": "me"}]},
        {"prompt": [{"role": "user", "content": "q2"}]},
    ]
    with pytest.raises(UserError, match=r"x.parquet, row 2: messages\[0\].content: is empty"):
        load(folder / "x.parquet", "demonstrations")


def test_a_folder_and_a_glob_are_read_in_the_order_of_names(folder: Path) -> None:
    for name, row in (("b.jsonl", PROMPTS[1]), ("a.jsonl", PROMPTS[0]), (".hidden.jsonl", PROMPTS[2])):
        (folder / name).write_text(lines([row]))
    (folder / "notes.md").write_text("not data")
    assert load(folder)[0] == load(folder / "*.jsonl")[0] == PROMPTS[:2]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.jsonl", "data.path: there is no file none.jsonl: type data.path=<"),
        ("*.jsonl", "data.path: there is no file"),
        ("notes.md", "data.path: notes.md is none of .jsonl"),
        ("empty", "data.path: no .jsonl"),
        ("saved", "data.path: saved was saved by the datasets library: type data=hub data.name=saved"),
    ],
)
def test_a_path_without_rows_is_refused(folder: Path, path: str, words: str) -> None:
    (folder / "notes.md").write_text("not data")
    (folder / "empty").mkdir()
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        Jsonl(path=path).load("prompts")
    assert str(caught.value).startswith(words)
    assert Jsonl.problems("prompts", path=path) == [str(caught.value)]


def test_a_file_without_rows_is_refused(folder: Path) -> None:
    (folder / "e.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"e.jsonl: no row to train on is left of 0"):
        Jsonl(path="e.jsonl").load("prompts")
    assert Jsonl.problems("prompts", path="e.jsonl") == [
        "data.path: e.jsonl has no rows: type data.path=<file, folder or glob>"
    ]


# ---- broken files ----------------------------------------------------------------------------------------------------
GOOD = '{"prompt": "p", "chosen": "a", "rejected": "b"}'
# (name, content, form, what is said of it)
BROKEN: list[tuple[str, str | bytes, str, list[str]]] = [
    ("a.jsonl", f"{GOOD}\n{{oops}}\n", "pairs", [":2: is not JSON (Expecting property name"]),
    ("a.jsonl", f"{GOOD}\n{GOOD},\n", "pairs", [":2: is not JSON (Extra data, column 48)"]),
    ("a.jsonl", GOOD[:-5], "pairs", [":1: is not JSON"]),
    ("a.jsonl", f"{GOOD}\n[1, 2]\n", "pairs", [":2: is a list, not an object"]),
    ("a.jsonl", f'{GOOD}\n"text"\n', "pairs", [":2: is a str, not an object"]),
    ("a.jsonl", "null\n", "pairs", [":1: is a NoneType, not an object"]),
    ("a.jsonl", f"{GOOD}\n".encode() + b'{"prompt": "\xff"}\n', "pairs", [":2: is not UTF-8"]),
    ("a.jsonl", "[" * 100_000, "pairs", [":1: is nested too deeply"]),
    ("a.jsonl", f'{GOOD}\n{{"prompt": "p"}}\n', "pairs", [":2: rejected: missing: a row with a prompt alone"]),
    ("a.jsonl", f'{GOOD}\n{{"chosen": "a"}}\n', "pairs", [":2: rejected: missing beside chosen"]),
    ("a.jsonl", '{"prompt": "p", "chosen": "a", "rejected": "a"}', "pairs", [":1: rejected: is the same as chosen"]),
    ("a.jsonl", '{"prompt": "p", "chosen": "a", "rejected": 5}', "pairs", [":1: rejected: 5 is not text"]),
    ("a.jsonl", '{"prompt": null, "answer": "4"}', "prompts", [":1: prompt: missing"]),
    ("a.jsonl", '{"prompt": "   "}', "prompts", [":1: prompt: is empty"]),
    (
        "a.jsonl",
        '{"prompt": [{"role": "usr", "content": "x"}]}',
        "prompts",
        [":1: prompt[0].role: 'usr' is no known role"],
    ),
    ("a.jsonl", '{"messages": []}', "demonstrations", [":1: messages: [] is no list of messages"]),
    (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": "x"}]}',
        "demonstrations",
        [":1: messages: has no assistant's"],
    ),
    ("a.jsonl", '{"messages": "hello"}', "demonstrations", [":1: messages: 'hello' is no list of messages"]),
    ("a.jsonl", '{"conversations": [{"from": "human"}]}', "demonstrations", [":1: conversations[0].content: missing"]),
    ("a.jsonl", '{"prompt": "p", "completion": ""}', "demonstrations", [":1: completion: is empty"]),
    (
        "a.jsonl",
        '{"prompt": "p", "completion": "c", "label": "maybe"}',
        "unpaired",
        [":1: label: 'maybe' is neither true nor false"],
    ),
    (
        "a.jsonl",
        '{"prompt": "p", "completions": ["s"], "labels": []}',
        "stepwise",
        [":1: labels: [] is no label for each"],
    ),
    ("a.jsonl", '{"prompt": "p", "completions": "abc"}', "ranked", [":1: completions: 'abc' is no list of two"]),
    ("a.jsonl", r'{"prompt": "a\ud800"}', "prompts", [":1: prompt: character 2 is half a surrogate pair"]),
    (
        "a.jsonl",
        r'{"prompt": [{"role": "user", "content": "\udc00"}]}',
        "prompts",
        [":1: prompt[0].content: character 1 is"],
    ),
    ("a.jsonl", f'{{"prompt": {"1" * 5000}}}', "prompts", [":1: is not JSON that Python reads"]),
    ("a.json", f'[{{"prompt": {"1" * 5000}}}]', "prompts", [":1: is not JSON that Python reads"]),
    ("a.json", f"[{GOOD},\n{'[' * 100_000}", "pairs", [":2: is nested too deeply"]),
    ("a.json", f"[{GOOD}]\n{GOOD}", "pairs", [":1: is not JSON (text after the array)"]),
    ("a.jsonl.gz", b"not gzip", "pairs", ["a.jsonl.gz: cannot be read (Not a gzipped file"]),
    ("a.csv.gz", gzip.compress(b"prompt\nx")[:-4], "prompts", ["a.csv.gz: cannot be read"]),
    ("a.json", f"[{GOOD},\n {GOOD}", "pairs", [":2: is not JSON"]),
    ("a.json", f"[{GOOD}\n {GOOD}]", "pairs", [":2: is not JSON (Expecting ',' or ']'"]),
    ("a.json", f"[{GOOD},\n 7,\n {{}}]", "pairs", [":2: is a int, not an object", ":3: prompt: missing"]),
    ("a.json", f"[{GOOD},", "pairs", [":1: is not JSON (the array has no end)"]),
    ("a.json", b"[\xff]", "pairs", ["a.json: is not UTF-8 (byte 2)"]),
    ("a.json", "{\n  'prompt': 1\n}", "pairs", [":1: is not JSON (Expecting property name", "line 2, column 3"]),
    ("a.csv", "prompt,answer\np,1\nq\n", "prompts", [":3: has 1 cells, the header 2"]),
    ("a.csv", "prompt,answer\np,1,2\n", "prompts", [":2: has 3 cells, the header 2"]),
    ("a.csv", 'prompt,answer\n"p\nq",1\nr\n', "prompts", [":4: has 1 cells"]),
    ("a.csv", "prompt,prompt\np,q\n", "prompts", [":1: the header names 'prompt' twice"]),
    ("a.csv", ",\np,q\n", "prompts", [":1: the header has no names"]),
    ("a.csv", 'prompt\n"p" q\n', "prompts", [":2: is not CSV"]),
    ("a.csv", b"prompt\n\xff\n", "prompts", ["a.csv:2: is not UTF-8 (byte 1)"]),
    ("a.csv", "prompt,answer\n,1\n", "prompts", [":2: prompt: missing"]),
    ("a.parquet", b"PAR1 not really", "prompts", ["a.parquet: is not Parquet"]),
]


@pytest.mark.parametrize(
    ("name", "content", "form", "said"), BROKEN, ids=[f"{i:02}-{case[3][0]:.45}" for i, case in enumerate(BROKEN)]
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, name: str, content: Any, form: Any, said: list[str]) -> None:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    problems = Jsonl.problems(form, path=name, heldout=None)
    with pytest.raises(UserError) as caught:
        load(Path(name), form)
    assert problems
    for words in said:
        assert any(words in problem and problem.startswith(name) for problem in problems), problems
        assert words in str(caught.value)


def test_a_broken_line_and_a_row_without_a_prompt_are_in_one_error(folder: Path) -> None:
    rows = [json.dumps(row) for row in PROMPTS]
    rows[16] = rows[16][:-3]
    rows[11] = '{"answer": "11"}'
    (folder / "train.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserError) as caught:
        load(Path("train.jsonl"))
    first, second, third, last = str(caught.value).splitlines()
    assert first == "2 rows cannot be used as prompts:"
    assert second.startswith("  - train.jsonl:12: prompt: missing: the row has answer: name the columns: data.fields=")
    assert third.startswith("  - train.jsonl:17: is not JSON (Unterminated string")
    assert last == "Mend them, or go on without them: data.bad_rows=drop"


def test_bad_rows_can_be_dropped_with_a_word_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.jsonl").write_text(lines([PROMPTS[0], {"x": 1}, PROMPTS[1]]))
    train, _ = load(Path("a.jsonl"), bad_rows="drop")
    assert train == PROMPTS[:2]
    assert "a.jsonl: 1 of 3 rows dropped:\n  - a.jsonl:2: prompt: missing" in caplog.text
    assert Jsonl.problems("prompts", path="a.jsonl", bad_rows="drop") == []
    (folder / "b.jsonl").write_text(lines([{"x": 1}]))
    with pytest.raises(UserError, match=r"b.jsonl: no row to train on is left of 1"):
        load(Path("b.jsonl"), bad_rows="drop")


# ---- before anything heavy -------------------------------------------------------------------------------------------
def test_problems_are_found_without_torch_in_under_a_second(folder: Path) -> None:
    rows = [*PROMPTS * 200, {"prompt": 1}]
    (folder / "a.jsonl").write_text(lines(rows))
    code = (
        "import sys, time; start = time.process_time()\n"
        "from alignment.data.jsonl import Jsonl\n"
        "found = Jsonl.problems('prompts', path='a.jsonl', heldout=0.1)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow', 'lightning'} & set(sys.modules)\n"
        "print(time.process_time() - start, sorted(heavy), found)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )
    seconds, _, rest = run.stdout.partition(" ")
    assert rest.startswith("[] ['a.jsonl:4001: prompt: 1 is not text")
    assert float(seconds) < 1


def test_only_the_first_rows_of_a_large_file_are_looked_at_beforehand(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"prompt": "p"}\n' * PREFLIGHT_ROWS + "broken\n")
    start = time.process_time()
    assert Jsonl.problems("prompts", path="a.jsonl") == []
    assert time.process_time() - start < 2
    with pytest.raises(UserError, match=f"a.jsonl:{PREFLIGHT_ROWS + 1}: is not JSON"):
        load(Path("a.jsonl"))


def test_both_files_are_checked_and_many_problems_are_counted(folder: Path) -> None:
    (folder / "a.jsonl").write_text(lines([{"prompt": i} for i in range(30)]))
    problems = Jsonl.problems("prompts", path="a.jsonl", heldout="none.jsonl")
    assert problems[0] == "data.heldout: there is no file none.jsonl: type data.heldout=<file, folder or glob>"
    assert problems[1].startswith("a.jsonl:1: prompt: 0 is not text")
    assert problems[-1] == "... and 11 more" and len(problems) == 21


@pytest.mark.parametrize(
    "keys", [{}, {"path": None}, {"path": 3}, {"path": "x", "unknown": 1}, {"path": "x", "fields": 3}]
)
def test_keys_that_others_report_are_left_alone(keys: dict[str, Any]) -> None:
    assert Jsonl.problems("prompts", **keys) == []


# ---- held-out rows ---------------------------------------------------------------------------------------------------
def test_a_share_or_a_number_is_held_out_and_repeats(folder: Path) -> None:
    (folder / "a.jsonl").write_text(lines(PROMPTS))
    for heldout, expected in ((0.25, 5), (3, 3), (0, 0), (0.01, 0)):
        train, held = load(folder / "a.jsonl", heldout=heldout)
        assert (len(train), len(held)) == (20 - expected, expected)
        assert sorted([*train, *held], key=PROMPTS.index) == PROMPTS
        assert load(folder / "a.jsonl", heldout=heldout) == (train, held)
    assert load(folder / "a.jsonl", heldout=5, seed=1)[1] != load(folder / "a.jsonl", heldout=5)[1]


def test_which_rows_are_held_out_depends_on_neither_order_nor_form(folder: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(20)]
    (folder / "a.jsonl").write_text(lines(rows))
    (folder / "b.jsonl").write_text(lines(rows[::-1]))
    held = [
        {row["prompt"] for row in load(folder / name, form, heldout=4)[1]}
        for name, form in (("a.jsonl", "pairs"), ("b.jsonl", "prompts"), ("a.jsonl", "unpaired"))
    ]
    assert len(held[0]) == 4 and held[0] == held[1] == held[2]


def test_rows_of_one_prompt_are_never_divided(folder: Path) -> None:
    rows = [{"prompt": f"p{i % 7}", "completion": f"c{i}"} for i in range(70)]
    (folder / "a.jsonl").write_text(lines(rows))
    train, held = load(folder / "a.jsonl", "demonstrations", heldout=0.3)
    assert len(held) == 20  # two groups of ten: a third would be more than 21
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}


def test_held_out_rows_of_their_own_file_and_a_word_about_those_trained_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.jsonl").write_text(lines(PROMPTS[:10]))
    (folder / "b.jsonl").write_text(lines(PROMPTS[8:]))
    train, held = load(folder / "a.jsonl", heldout=str(folder / "b.jsonl"))
    assert (train, held) == (PROMPTS[:10], PROMPTS[8:])
    assert "2 of 12 held-out prompts are among the training rows" in caplog.text
    assert "b.jsonl:1)" in caplog.text


@pytest.mark.parametrize(
    ("heldout", "words"),
    [(1.0, "data.heldout: 1.0 is neither a share"), (-1, "-1 is neither"), (20, "leaves none to train on")],
)
def test_what_cannot_be_held_out_is_refused(folder: Path, heldout: Any, words: str) -> None:
    (folder / "a.jsonl").write_text(lines(PROMPTS))
    with pytest.raises(UserError, match=words):
        load(folder / "a.jsonl", heldout=heldout)


def test_rows_know_their_line(folder: Path) -> None:
    (folder / "a.jsonl").write_text("\n" + lines(PROMPTS[:2]))
    assert [row.where for row in Jsonl(path="a.jsonl", heldout=None).load("prompts")[0]] == ["a.jsonl:2", "a.jsonl:3"]


def test_the_defaults_are_those_of_the_yaml() -> None:
    conf = ROOT / "conf" / "data"
    settings = yaml.safe_load((conf / "base" / "rows.yaml").read_text())
    assert set(yaml.safe_load((conf / "jsonl.yaml").read_text())) == {"defaults", "_target_", "path"}
    built, bare = Jsonl(path="x", **settings), Jsonl(path="x")
    assert vars(built) == vars(bare)
