"""task=generate through run.py: every prompt comes back with its samples, and what is kept can be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import run
from alignment.errors import UserError
from alignment.task.generate import _kept

BASE = ["task=generate", "model=tiny", "rollout.max_new_tokens=6", "task.num_samples=3", "task.batch_size=4"]
ROWS = [{"prompt": f"Count to {n}", "answer": str(n), "level": n} for n in range(6)]


def generate(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = ["data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "data.heldout=2"]
    folder = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    result = run.run([*BASE, *data, f"output_dir={folder}", *words])
    return result, [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]


def test_each_prompt_comes_back_with_its_samples_and_scores(tmp_path: Path) -> None:
    result, lines = generate(tmp_path, "reward=accuracy")
    _, others = generate(tmp_path, "reward=accuracy", "task.split=heldout")
    assert sorted(line["level"] for line in lines + others) == list(range(6))
    assert len(lines) == 4
    for line in lines:
        assert line["prompt"] == f"Count to {line['level']}"
        assert [len(line[name]) for name in ("completions", "finished", "scores")] == [3, 3, 3]
        assert line["rewards"]["accuracy"] == line["scores"]
    assert (result["prompts"], result["completions"]) == (4, 12)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tmp_path: Path) -> None:
    one, two, other = (generate(tmp_path, "reward=[]", f"seed={seed}")[1] for seed in (1, 1, 2))
    assert one == two
    assert [line["completions"] for line in one] != [line["completions"] for line in other]
    assert "scores" not in one[0]


def test_what_is_kept_is_trained_on(tmp_path: Path) -> None:
    digits = f"reward.function.path={Path(__file__).parent.parent / 'run' / 'rewards.py'}:digits"
    result, lines = generate(
        tmp_path, "task.num_samples=16", "reward=function", digits, "task.keep=passing", "task.min_score=0.1"
    )
    kept = [json.loads(line) for line in (Path(result["output_dir"]) / "kept.jsonl").read_text().splitlines()]
    expected = {
        (line["prompt"], text)
        for line in lines
        for text, finished, score in zip(line["completions"], line["finished"], line["scores"], strict=True)
        if finished and score >= 0.1 and text.strip()
    }
    assert kept
    assert {(row["prompt"], row["completion"]) for row in kept} == expected
    words = ["algorithm=sft", "algorithm.max_steps=1", "algorithm.batch_size=1", "algorithm.microbatch_size=1"]
    words += ["data=jsonl", f"data.path={result['output_dir']}/kept.jsonl", "data.heldout=null", "reward=[]"]
    trained = run.run(["model=tiny", *words, "evaluation.num_prompts=0", f"output_dir={tmp_path / 'sft'}"])
    assert trained["steps"] == 1


LINE = {
    "prompt": "p",
    "completions": ["a", "b", "b", "c", " ", "d"],
    "finished": [True, True, True, False, True, True],
    "scores": [0.5, 2.0, 2.0, 9.0, 7.0, None],
    "rewards": {},
}


@pytest.mark.parametrize(
    ("keep", "min_score", "expected"),
    [
        # "c" was cut, " " is empty, "d" has no score, and "b" comes twice
        ("passing", None, [("a", 0.5), ("b", 2.0)]),
        ("passing", 0.6, [("b", 2.0)]),
        ("best", None, [("b", 2.0)]),
        ("best", 3.0, []),
        (None, None, []),
    ],
)
def test_what_is_kept(keep: str | None, min_score: float | None, expected: list[tuple[str, float]]) -> None:
    kept = list(_kept(LINE, keep, min_score))
    assert [(row["completion"], row["score"]) for row in kept] == expected
    assert all(set(row) == {"prompt", "completion", "score"} for row in kept)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.keep=best", "reward=[]"], "task.keep: best goes by scores"),
        (["task.split=heldout", "data.heldout=null"], "task.split: nothing is held out"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(tmp_path, *words)
