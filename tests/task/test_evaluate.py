"""task=evaluate through run.py, against numbers that are computed here from its own samples, and by transformers."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import run
from alignment.errors import UserError

DIGITS = f"reward.function.path={Path(__file__).parent.parent / 'run' / 'rewards.py'}:digits"
BASE = ["model=tiny", "trainer.precision=32-true", "rollout.max_new_tokens=6", "reward=[accuracy,function]", DIGITS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a short run, and the model below it as a plain folder."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["algorithm=sft", "algorithm.max_steps=3", "algorithm.lr=0.05", "evaluation.num_prompts=0"]
    run.run([*BASE, *words, f"output_dir={folder / 'run'}"])
    return folder / "run" / "model"


def evaluate(folder: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result = run.run(["task=evaluate", *BASE, "task.batch_size=7", f"output_dir={folder}", *words])
    assert json.loads((folder / "summary.json").read_text())["reward"] == result["reward"]
    return result, [json.loads(line) for line in (folder / "evaluated.jsonl").read_text().splitlines()]


def test_numbers_are_those_of_its_samples(tmp_path: Path, trained: Path) -> None:
    result, lines = evaluate(
        tmp_path / "out", f"model.adapter_path={trained}", "task.against=base", "task.num_prompts=9"
    )
    assert len(lines) == result["prompts"] == 9
    assert result["completions"] == 36
    scores = [line["rewards"]["function"] for line in lines]
    assert result["function"] == pytest.approx(sum(map(sum, scores)) / 36)
    assert result["function/low"] < result["function"] < result["function/high"]
    # by its definition: the share of sets of k samples that hold one with score 1
    for k in (1, 2, 4):
        sets = [any(score == 1 for score in chosen) for row in scores for chosen in itertools.combinations(row, k)]
        assert result[f"function_pass@{k}"] == pytest.approx(sum(sets) / len(sets))
    wins = [
        (a > b) + 0.5 * (a == b) for line in lines for a, b in zip(line["scores"], line["against_scores"], strict=True)
    ]
    assert result["against/win_rate"] == pytest.approx(sum(wins) / 36)
    assert [line["completions"] for line in lines] != [line["against"] for line in lines]


@pytest.mark.parametrize("temperature", [1.0, 0])
def test_against_itself_nothing_differs(tmp_path: Path, trained: Path, temperature: float) -> None:
    words = [f"model.adapter_path={trained}", f"task.against={trained}", f"rollout.temperature={temperature}"]
    result, lines = evaluate(tmp_path / "out", *words)
    assert result["against/kl"] == 0.0
    assert result["against/win_rate"] == 0.5
    assert all(line["completions"] == line["against"] for line in lines)


def test_perplexity_is_that_of_transformers(tmp_path: Path, trained: Path) -> None:
    texts = ["The number is 12.", "Add 3 and 4 to get 7, then stop."]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [f"model.adapter_path={trained}", "task.against=base", "task.num_prompts=4", "task.num_samples=1"]
    result, _ = evaluate(tmp_path / "out", *words, f"task.text={tmp_path / 'text.jsonl'}", "rollout.temperature=0.8")

    config = json.loads((trained / "adapter_config.json").read_text())
    base, below = (AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]).eval() for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(trained)
    sums: dict[str, list[tuple[float, int]]] = {}
    for name, model in (("against/perplexity", base), ("perplexity", PeftModel.from_pretrained(below, trained).eval())):
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            taken = logprobs.gather(-1, ids[0, 1:, None])
            sums.setdefault(name, []).append((-float(taken.sum()), taken.numel()))
    for name, pairs in sums.items():
        loss, count = (sum(column) for column in zip(*pairs, strict=True))
        assert result[name] == pytest.approx(math.exp(loss / count), rel=1e-4)
        assert result[f"{name}/low"] <= result[name] <= result[f"{name}/high"]


def test_another_model_by_its_folder(tmp_path: Path, trained: Path) -> None:
    config = json.loads((trained / "adapter_config.json").read_text())
    shutil.copytree(config["base_model_name_or_path"], tmp_path / "base")
    words = [f"model.adapter_path={trained}", "task.num_prompts=3"]
    by_name, _ = evaluate(tmp_path / "one", *words, "task.against=base")
    by_folder, _ = evaluate(tmp_path / "two", *words, f"task.against={tmp_path / 'base'}")
    assert by_name["against/kl"] == pytest.approx(by_folder["against/kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.against=base"], "task.against: base is the model without its adapter, and there is none"),
        (["task.against=./nowhere"], "task.against: there is no folder ./nowhere"),
        (["task.text=./nowhere.jsonl"], "task.text: there is no file ./nowhere.jsonl"),
        (["task.harness=[hellaswag]"], "task.harness: lm-eval-harness is not installed: type pip install"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        evaluate(tmp_path / "out", *words)
