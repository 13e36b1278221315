"""A process reward model as a reward: the tokens it was trained on, and each step's probability by a plain forward."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from alignment.data.encode import encode
from alignment.errors import UserError
from alignment.model.tiny import Tiny
from alignment.reward.prm import ProcessRewardModel

ASKED = [{"role": "user", "content": "What is 2 + 2 + 3?"}]
SAID = ["2 + 2 is 4.\n4 + 3 is 7.", "7", "\n\nIt is 8.\n\nSurely.\n", ""]
STEPS = [["2 + 2 is 4.", "4 + 3 is 7."], ["7"], ["It is 8.", "Surely."], [""]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    source = Tiny(path=str(tmp_path_factory.mktemp("models")))
    model, place = source.scorer(2, per_token=True), tmp_path_factory.mktemp("prm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score" in name or "classifier" in name:
                parameter.normal_()
    source.save(model, place)
    return place


def by_transformers(folder: Path, prompt: list[dict[str, str]] | str) -> list[list[float]]:
    """P(good) after each step of each completion, one forward pass for each, with the ids that training has."""
    model, source = AutoModelForTokenClassification.from_pretrained(folder).eval(), Tiny(path=str(folder.parent / "t"))
    found = []
    for steps in STEPS:
        row = {"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}
        (example,), _ = encode([row], "stepwise", source.tokenizer, max_prompt_tokens=None, max_completion_tokens=None)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example.prompt_ids + example.completions[0]])).logits[0]
        good = logits[len(example.prompt_ids) :].softmax(-1)[:, 1]
        mask = example.loss_masks[0] if example.loss_masks else [True] * len(good)  # None: all of them
        found.append(good[torch.tensor(mask)].tolist())
    return found


@pytest.mark.parametrize("prompt", [ASKED, "2 + 2 + 3 ="])
@pytest.mark.parametrize("aggregate", ["min", "prod", "last", "mean"])
def test_scores_are_those_of_a_plain_forward(folder: Path, prompt, aggregate) -> None:
    steps = by_transformers(folder, prompt)
    assert [len(each) for each in steps] == [2, 1, 2, 1]
    how = {"min": min, "prod": math.prod, "last": lambda p: p[-1], "mean": lambda p: sum(p) / len(p)}[aggregate]
    reward = ProcessRewardModel(path=str(folder), aggregate=aggregate, batch_size=3)
    scores = reward(SAID, [{"prompt": prompt}] * 4)
    assert scores == pytest.approx([how(each) for each in steps], rel=1e-5)
    assert len(set(scores)) == 4


def test_the_scale_and_the_separator(folder: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.prm\.separator: it has no token"):
        ProcessRewardModel(path=str(folder), separator="")


def test_a_row_without_a_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="a row without a prompt"):
        ProcessRewardModel(path=str(folder))(["7"], [{}])


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"reward\.prm\.path: .* is an adapter: .*algorithm=prm"):
        ProcessRewardModel(path=str(tmp_path))
