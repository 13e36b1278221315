"""Files as they come, from the command line to a saved model; and the report on them, with and without training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SMALL = ["model=tiny", "output_dir=out"]


def sharegpt(i: int) -> dict[str, Any]:
    turns = [("human", f"What is {i} + 1?"), ("gpt", f"It is {i + 1}."), ("human", "Thanks"), ("gpt", "Any time.")]
    return {"id": f"identity_{i}", "conversations": [{"from": who, "value": text} for who, text in turns]}


def trl(i: int) -> dict[str, Any]:
    prompt, completion = ({"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}"})
    return {"prompt": [prompt], "completion": [completion]}


def text(i: int) -> dict[str, Any]:
    return {"prompt": f"{i} + 1 = ", "chosen": f"{i + 1}, for sure", "rejected": f"{i}", "source": f"set {i % 2}"}


def write(name: str, row: Callable[[int], dict[str, Any]], count: int = 30) -> None:
    rows = [row(i) for i in range(count)]
    lines = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(one) + "\n" for one in rows)
    Path(name).write_text(lines)


@pytest.mark.parametrize(("name", "row", "learned"), [("chat.json", sharegpt, 2), ("trl.jsonl", trl, 1)])
def test_a_file_in_a_usual_style_needs_no_key_but_its_path(
    run_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: Any, learned: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write(name, row)
    summary = run_py.run(
        [
            "algorithm=sft",
            "data=jsonl",
            f"data.path={name}",
            *SMALL,
            "algorithm.max_steps=2",
            "evaluation.num_prompts=2",
        ]
    )
    assert summary["steps"] == 2
    assert (tmp_path / "out" / "model" / "tokenizer.json").exists()
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())
    assert report["form"] == "demonstrations"
    numbers = report["sets"]["train"]
    assert numbers["rows"] == numbers["examples"] + sum(numbers["dropped"].values())
    shown = (tmp_path / "out" / "data_report.txt").read_text()
    assert shown.count("[[") == learned + 1, "each reply between marks, and the words that explain them"
    assert (tmp_path / "out" / "data_report.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_alone_loads_no_weights_and_leaves_nothing_else(
    run_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write("pairs.jsonl", text, 80)
    with monkeypatch.context() as patch:
        patch.setattr("alignment.model.hf.HFModel.policy", lambda self: pytest.fail("weights are not asked for"))
        summary = run_py.run(
            ["task=data_report", "algorithm=dpo", "data=jsonl", "data.path=pairs.jsonl", *SMALL, "task.example=1"]
        )
    numbers = json.loads((tmp_path / "out" / "data_report.json").read_text())["sets"]["train"]
    assert summary["train/examples"] == numbers["examples"]
    assert numbers["chosen_longer"] == 1.0
    assert sum(numbers["sources"].values()) == numbers["examples"]
    assert summary["warnings"] >= 1, "length is what tells chosen from rejected"
    shown = capsys.readouterr().out
    assert "chosen (" in shown
    assert ", for sure" in shown
    assert "\033[" not in shown, "no colour where no terminal is"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"data_report.json", "data_report.txt"}
    assert not {"model", "checkpoints", "metrics.csv"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_an_example_that_is_not_there_is_refused(
    run_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write("trl.jsonl", trl, 5)
    words = ["task=data_report", "algorithm=sft", "data=jsonl", "data.path=trl.jsonl", *SMALL, "task.example=9"]
    assert run_py.main(words) == 1
    assert "task.example: 9 of 5 examples: type task.example=0" in capsys.readouterr().err
