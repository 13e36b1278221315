"""task=score through run.py: rows come back as they were, with their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import run
from alignment.errors import UserError


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path / "out"
    result = run.run(["task=score", f"output_dir={folder}", *words])
    return result, [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]


def test_every_row_comes_back_with_its_scores(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "completion": "4", "answer": "4", "extra": [1]},
        {"prompt": "2 + 3?", "completion": "6", "answer": "5"},
        {"prompt": "?", "completion": "6"},
        {"prompt": "1 + 1?", "completions": ["2", "3", [{"role": "assistant", "content": "2"}]], "answer": "2"},
    ]
    result, scored = score(tmp_path, f"task.path={write(tmp_path / 'a.jsonl', rows)}", "task.batch_size=3")
    assert [{k: v for k, v in row.items() if k not in ("score", "scores", "rewards")} for row in scored] == rows
    assert [row.get("score") for row in scored] == [1.0, 0.0, None, None]
    assert scored[3]["scores"] == [1.0, 0.0, 1.0]
    assert scored[3]["rewards"] == {"accuracy": [1.0, 0.0, 1.0]}
    assert (result["completions"], result["score"], result["score/unscorable"]) == (6, pytest.approx(3 / 5), 1)


def test_several_rewards_are_weighted(tmp_path: Path) -> None:
    rows = [{"completion": "<think>x</think> 4", "answer": "4"}, {"completion": "4", "answer": "4"}]
    words = [f"task.path={write(tmp_path / 'a.jsonl', rows)}", "reward=[accuracy,format]", "reward.format.weight=0.5"]
    words += ["reward.accuracy.reasoning_end='</think>'"]
    _, scored = score(tmp_path, *words)
    assert [row["rewards"] for row in scored] == [{"accuracy": 1.0, "format": 1.0}, {"accuracy": 0.0, "format": 0.0}]
    assert [row["score"] for row in scored] == [1.5, 0.0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"completion": "4"}, {"prompt": "x"}], "a.jsonl:2: completion: is missing"),
        ([{"completions": "4"}], "a.jsonl:1: completions: is no list of completions"),
        ([{"completion": 4}], "a.jsonl:1: completion: is neither text nor messages"),
        ([7], "a.jsonl:1"),
        ([], "task.path: .*a.jsonl has no rows"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_before_anything_is_written(
    tmp_path: Path, rows: list[Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        score(tmp_path, f"task.path={write(tmp_path / 'a.jsonl', rows)}")
    assert not (tmp_path / "out" / "scored.jsonl").exists()


def test_programs_are_run(tmp_path: Path) -> None:
    right = "def f(n): return n * n"
    programs = [right, "def f(n): return 4", "def f(n):\n    while True: pass", right + "  # not in a block"]
    rows = [{"completion": f"```python\n{p}\n```", "tests": ["assert f(2) == 4", "assert f(3) == 9"]} for p in programs]
    rows[3]["completion"] = programs[3]
    rows.append({"completion": f"```python\n{right}\n```"})
    words = [f"task.path={write(tmp_path / 'a.jsonl', rows)}", "reward=code", "reward.code.cpu_seconds=1"]
    result, scored = score(tmp_path, *words, "reward.code.timeout=120")
    assert [row["score"] for row in scored] == [1.0, 0.5, 0.0, 0.0, None]
    assert result["score/unscorable"] == 1
