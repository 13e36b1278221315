"""What the parts of a run refuse is told before the first job of a command starts, all of it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run
from alignment.errors import ConfigError

TINY = ["model=tiny", "evaluation.num_prompts=0"]


def refused(folder: Path, *words: str) -> list[str]:
    """The problems of a command, after which there is no run."""
    with pytest.raises(ConfigError) as caught:
        run.run([*(TINY if "model=hf" not in words else []), f"output_dir={folder / 'run'}", *words])
    assert not (folder / "run").exists()
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # options that the chosen loss has no use for
        (["algorithm=dpo", "algorithm.length_average=true"], "algorithm.loss: sigmoid cannot use length_average=True"),
        (["algorithm=hinge", "algorithm.label_smoothing=0.1"], "algorithm.loss: hinge cannot use label_smoothing=0.1"),
        (["algorithm=dpo", "algorithm.tau=0.5"], "algorithm.loss: sigmoid cannot use tau=0.5"),
        (["algorithm=tpo", "algorithm.gamma_beta_ratio=0.3"], "algorithm.loss: tpo cannot use gamma_beta_ratio=0.3"),
        (["algorithm=dpo", "algorithm.divergence_alpha=0.3"], "algorithm.loss: reverse_kl cannot use divergence_alpha"),
        (["algorithm=grpo", "algorithm.tau_pos=1.0"], "algorithm.loss: dapo cannot use tau_pos=1.0"),
        (["algorithm=dpo", "algorithm.loss_weights=[1,2]"], "algorithm.loss: 1 losses need as many weights, got 2"),
        # a number out of the loss's range
        (["algorithm=dpo", "algorithm.beta=0"], "algorithm.beta: must be above 0, got 0: type algorithm.beta="),
        # what is named and is not there, or is something else
        (["algorithm=gkd", "algorithm.teacher.path=./none"], "algorithm.teacher.path: there is no folder ./none: type"),
        (["model.adapter_path=./none"], "model.adapter_path: there is no folder none: type model.adapter_path="),
        (["model=hf", "model.path=./none"], "model.path: there is no folder ./none: type model.path="),
        (["reward=function", "reward.function.path=none.py:score"], "reward.function.path: there is no file"),
        (["data.heldout=100"], "data.heldout: 100 of 81 problems leaves none to train on: type data.heldout=0.25"),
        (["optimizer.beta=1"], "optimizer.beta: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_part_that_refuses_is_told_before_the_run(tmp_path: Path, words: list[str], said: str) -> None:
    (problem,) = refused(tmp_path, *words)
    assert problem.startswith(said)


def test_all_parts_are_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): return [0.0] * len(completions)\n")
    found = refused(
        tmp_path,
        "data.heldout=100",
        "model.adapter_path=./none",
        "reward=function",
        f"reward.function.path={tmp_path / 'mine.py'}:scores",
    )
    assert sorted(problem.split(":")[0] for problem in found) == [
        "data.heldout",
        "model.adapter_path",
        "reward.function.path",
    ]


def test_a_sweep_is_refused_as_a_whole_and_the_jobs_are_named(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "-m", "algorithm=dpo,simpo", "algorithm.label_smoothing=0.1", "algorithm.beta=0,1")
    assert problem.startswith("[job 0 (model=tiny ")
    assert "algorithm.beta: must be above 0" in problem


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}),
        ("config.json", {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}),
    ],
)
def test_a_reward_model_is_no_language_model(tmp_path: Path, file: str, content: dict) -> None:
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / file).write_text(json.dumps(content))
    for key, words in (("model.path", ["model=hf"]), ("algorithm.teacher.path", ["algorithm=gkd"])):
        (problem,) = refused(tmp_path, *words, f"{key}={tmp_path / 'rm'}")
        assert problem.startswith(f"{key}: {tmp_path / 'rm'} gives scores (")


def test_a_reward_models_adapter_is_none_of_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "SEQ_CLS"}))
    (problem,) = refused(tmp_path, f"model.adapter_path={tmp_path / 'rm'}")
    assert problem.startswith(f"model.adapter_path: {tmp_path / 'rm'} gives scores (SEQ_CLS)")
