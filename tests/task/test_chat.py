"""task=chat: turns, commands, and words that are the model's own."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import run
from alignment.model.tiny import Tiny
from alignment.task.chat import Turns, converse


def typed(*lines: str) -> Callable[[], str]:
    left = iter(lines)

    def ask() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def count(turns: Turns) -> str:
    return f"turn {len(turns)}"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["hello"], ["hello", "turn 1"]),
        (["a", "", "b"], ["a", "turn 1", "b", "turn 3"]),
        (["a", "b", "/undo", "c"], ["a", "turn 1", "c", "turn 3"]),
        (["/undo", "a"], ["a", "turn 1"]),
        (["a", "/reset", "b"], ["b", "turn 1"]),
        (["a", "/quit", "b"], ["a", "turn 1"]),
        (["/what", "a"], ["a", "turn 1"]),
    ],
)
def test_turns(lines: list[str], said: list[str]) -> None:
    assert [turn["content"] for turn in converse(count, None, typed(*lines))] == said


def test_the_system_turn_stays(capsys: pytest.CaptureFixture[str]) -> None:
    turns = converse(count, "Be brief.", typed("a", "/undo", "/undo", "/reset", "b"))
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]
    assert turns[2]["content"] == "turn 2"


def test_greedy_words_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 1 + 1?\n"))
    words = ["rollout.temperature=0", "task.max_new_tokens=5", "trainer.precision=32-true", "task.system=Add."]
    run.run(["task=chat", "model=tiny", f"output_dir={tmp_path / 'out'}", *words])
    messages = json.loads((tmp_path / "out" / "chat.json").read_text())["messages"]
    assert [turn["role"] for turn in messages] == ["system", "user", "assistant"]

    folder = Tiny().folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    start = len(ids)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert messages[2]["content"] == tokenizer.decode(ids[start:], skip_special_tokens=True)
