"""One reference, whatever holds it: the same curves, one paid pass per sweep, and an adapter to start from."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import run
from alignment.batch import Batch, collate
from alignment.data.arithmetic import Arithmetic
from alignment.data.encode import encode
from alignment.model.hf import HFModel
from alignment.model.logprobs import completion_logprobs
from alignment.model.smollm2 import SmolLM2
from alignment.model.tiny import Tiny

BASE = ["trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
DPO = ["algorithm=dpo", "algorithm.max_steps=4", "algorithm.batch_size=4", "algorithm.microbatch_size=4"]
FAST = ["algorithm.lr=1e-2", "algorithm.warmup_ratio=0"]  # so that four steps change something
REAL = pytest.param("smollm2", 1e-5, marks=pytest.mark.slow)
HOLDERS = ["lora", "frozen", "precompute"]


@pytest.fixture(autouse=True)
def stored(tmp_path: Path) -> str:
    """Reference log-probs of these tests stay theirs."""
    return f"ref_strategy.folder={tmp_path / 'stored'}"


def train(folder: Path, *words: str) -> dict[str, float]:
    return run.run([f"output_dir={folder}", *BASE, *words])


def curve(folder: Path, name: str = "train/loss") -> torch.Tensor:
    with open(folder / "metrics.csv") as file:
        return torch.tensor([float(row[name]) for row in csv.DictReader(file) if row["phase"] == "train"])


def keeping(holder: str, stored: str) -> list[str]:
    return [f"ref_strategy={holder}", *([stored] if holder == "precompute" else [])]


@pytest.mark.parametrize(("model", "tolerance"), [("tiny", 1e-6), REAL])
def test_the_curves_do_not_depend_on_who_holds_the_reference(
    tmp_path: Path, stored: str, model: str, tolerance: float
) -> None:
    for holder in HOLDERS:
        train(tmp_path / holder, f"model={model}", *DPO, *keeping(holder, stored))
    curves = [curve(tmp_path / holder) for holder in HOLDERS]
    assert (curves[0][0] - math.log(2)).abs() < 1e-6
    assert curves[0].unique().numel() == 4  # the policy does move
    for other in curves[1:]:
        torch.testing.assert_close(other, curves[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("model", "tolerance"), [("tiny", 1e-6), REAL])
def test_a_reference_that_is_the_policy_of_a_step_ago_keeps_the_loss_at_ln_2(
    tmp_path: Path, model: str, tolerance: float
) -> None:
    follow = ["ref_strategy=sync", "ref_strategy.alpha=1.0", "ref_strategy.every=1"]
    train(tmp_path, f"model={model}", *DPO, *follow)
    torch.testing.assert_close(curve(tmp_path), torch.full((4,), math.log(2)), rtol=0, atol=tolerance)
    assert curve(tmp_path, "train/logps/chosen").unique().numel() == 4  # the policy does move


# ---- the store ------------------------------------------------------------------------------------------------------
SMALL = ["model=tiny", *DPO, "algorithm.max_steps=2"]


def test_a_sweep_pays_for_one_reference_pass(tmp_path: Path, stored: str) -> None:
    """Another beta, loss, seed, length of the run or set of rows reads what the first job has stored."""
    first = train(tmp_path / "0", *SMALL, "ref_strategy=precompute", stored)
    assert first["reference/reused"] == 0
    changes = {
        "beta": ["algorithm.beta=0.5"],
        "loss": ["algorithm.loss=ipo"],
        "seed": ["seed=3"],
        "steps": ["algorithm.max_steps=3"],
        "fewer rows": ["data.num_problems=40"],
    }
    for name, change in changes.items():
        later = train(tmp_path / name, *SMALL, "ref_strategy=precompute", stored, *change)
        assert later["reference/computed"] == 0, name
    train(tmp_path / "held", *SMALL, "ref_strategy=frozen", *changes["loss"])
    torch.testing.assert_close(curve(tmp_path / "loss"), curve(tmp_path / "held"), rtol=0, atol=1e-6)


def cut_short(folder: Path) -> None:
    for shard in folder.rglob("*.shard"):
        shard.write_bytes(shard.read_bytes()[:-7])


def one_bit(folder: Path) -> None:
    for shard in folder.rglob("*.shard"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHANGES: dict[str, tuple[list[str], Callable[[Path], None]]] = {
    "another template": ([f"model.chat_template='{TEMPLATE}'"], lambda _: None),
    "another dtype": (["model.dtype=bfloat16"], lambda _: None),
    "another precision": (["trainer.precision=bf16-mixed"], lambda _: None),
    "another model": (["model.seed=1"], lambda _: None),
    "a shard cut short": ([], cut_short),
    "a flipped bit": ([], one_bit),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_stale_or_damaged_is_computed_again(tmp_path: Path, stored: str, change: str) -> None:
    words, damage = CHANGES[change]
    train(tmp_path / "before", *SMALL, "ref_strategy=precompute", stored)
    damage(tmp_path / "stored")
    again = train(tmp_path / "again", *SMALL, *words, "ref_strategy=precompute", stored)
    assert again["reference/computed"] == again["reference/reused"] + again["reference/computed"] > 0
    train(tmp_path / "held", *SMALL, *words, "ref_strategy=frozen")
    torch.testing.assert_close(curve(tmp_path / "again"), curve(tmp_path / "held"), rtol=0, atol=1e-6)


# ---- training that starts from an adapter ---------------------------------------------------------------------------
def pairs(source: HFModel) -> Batch:
    rows = Arithmetic(heldout=0.25).load("pairs")[0][:4]
    return collate(encode(rows, "pairs", source.tokenizer, max_prompt_tokens=128, max_completion_tokens=32)[0])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The adapter of a short SFT of a model, trained once for all tests."""
    made: dict[str, Path] = {}

    def adapter(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            sft = ["algorithm=sft", "algorithm.max_steps=3", "algorithm.batch_size=4", "algorithm.microbatch_size=4"]
            train(folder / "sft", f"model={model}", *sft, *FAST)
            made[model] = folder / "sft" / "model"
        return made[model]

    return adapter


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("holder", [*HOLDERS, "sync"])
def test_an_adapter_that_training_starts_from_is_the_reference(
    tmp_path: Path, stored: str, tuned: Callable[[str], Path], model: str, holder: str
) -> None:
    """Not the bare base: its log-probs differ, the first loss would not be ln 2. What is saved loads in plain peft."""
    start = [f"model={model}", f"model.adapter_path={tuned(model)}"]
    train(tmp_path / "dpo", *start, *DPO, *FAST, *keeping(holder, stored))
    assert float(curve(tmp_path / "dpo")[0]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(curve(tmp_path / "dpo", "train/rewards/margins")[0]) == pytest.approx(0, abs=1e-6)

    source = Tiny(adapter="none") if model == "tiny" else SmolLM2(adapter="none")
    base = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    batch = pairs(source)
    with torch.no_grad():
        bare = completion_logprobs(base, batch, path="dense").logprobs
        started = completion_logprobs(PeftModel.from_pretrained(base, str(tuned(model))), batch).logprobs
    trained = PeftModel.from_pretrained(source.frozen(), str(tmp_path / "dpo" / "model"))
    assert list(trained.peft_config) == ["default"]
    with torch.no_grad():
        saved = completion_logprobs(trained, batch).logprobs
    assert (started - bare).abs().max() > 0.01
    assert (saved - started).abs().max() > 0.01
    assert json.loads((tmp_path / "dpo" / "model" / "adapter_config.json").read_text())["peft_type"] == "LORA"
