"""task=export through run.py: a run's folder, or a checkpoint of it, in plain transformers and peft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

import run
from alignment.algorithm import ppo
from alignment.batch import Example, collate
from alignment.errors import ConfigError, UserError
from alignment.model.critic import Critic
from alignment.model.hf import HFModel
from alignment.task import export

IDS = torch.tensor([[72, 101, 108, 108, 111, 32, 50, 43, 50]])
COMMON = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
OFFLINE = ["algorithm.batch_size=8", "algorithm.microbatch_size=8", "algorithm.max_steps=2", "algorithm.lr=1e-2"]
KEEP = ["checkpoint.every=1", "checkpoint.keep=-1"]


@torch.no_grad()
def said(model: Any) -> torch.Tensor:
    """What a language model gives as log-probs, and a scorer as logits."""
    logits = model.eval()(IDS).logits
    return logits.log_softmax(-1) if logits.shape[-1] > 2 else logits


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, torch.Tensor]]:
    """Train once for each command line: the run's folder, and what the very module that was trained says at the end."""
    done: dict[tuple[str, ...], tuple[Path, torch.Tensor]] = {}

    def trained(*words: str) -> tuple[Path, torch.Tensor]:
        if words not in done:
            live: list[torch.Tensor] = []
            with pytest.MonkeyPatch.context() as patch:
                save = HFModel.save

                def listen(self: Any, policy: Any, *args: Any) -> None:
                    live.append(said(policy))
                    save(self, policy, *args)

                patch.setattr(HFModel, "save", listen)
                folder = tmp_path_factory.mktemp("run") / "run"
                run.run([*COMMON, *words, f"output_dir={folder}"])
            done[words] = folder, live[0]
        return done[words]

    return trained


DPO = ("algorithm=dpo", *OFFLINE, *KEEP)


def exported(tmp_path: Path, folder: Path, *words: str) -> Path:
    result = run.run(["task=export", f"task.run={folder}", f"output_dir={tmp_path / 'out'}", *words])
    return Path(result["folder"])


def front(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_the_folder_says_what_the_trained_module_said(tmp_path: Path, train: Any) -> None:
    folder, expected = train(*DPO)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    out = exported(tmp_path, folder)
    assert out == tmp_path / "out" / "model"
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(said(model), expected, rtol=0, atol=1e-5)
    start = AutoModelForCausalLM.from_pretrained(
        json.loads((folder / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    )
    assert (said(start) - expected).abs().max() > 1e-3
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert model.generation_config.eos_token_id == [257]
    assert front(out)["tags"] == ["alignment", "dpo", "lora"]
    assert "after 2 optimizer steps" in (out / "README.md").read_text()
    assert "rafailov2023direct" in (out / "README.md").read_text()
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_checkpoint_is_the_model_of_its_step(tmp_path: Path, train: Any) -> None:
    folder, expected = train(*DPO)
    last = exported(tmp_path, folder, "task.step=2", f"task.to={tmp_path / 'two'}")
    torch.testing.assert_close(said(AutoModelForCausalLM.from_pretrained(last)), expected, rtol=0, atol=1e-5)
    assert "| rewards/margins |" in (last / "README.md").read_text()
    first = exported(tmp_path, folder, "task.step=1", f"task.to={tmp_path / 'one'}", f"output_dir={tmp_path / 'out1'}")
    assert (said(AutoModelForCausalLM.from_pretrained(first)) - expected).abs().max() > 1e-4
    text = (first / "README.md").read_text()
    assert "after 1 optimizer steps" in text
    assert "## Results" not in text  # they are of the end
    with pytest.raises(ConfigError, match=r"task.step: there is no checkpoint of step 7 \(there are: 1, 2\)"):
        exported(tmp_path, folder, "task.step=7", f"output_dir={tmp_path / 'out7'}")


def test_an_adapter_alone_works_in_plain_peft(tmp_path: Path, train: Any) -> None:
    folder, expected = train(*DPO)
    base = json.loads((folder / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    out = exported(tmp_path, folder, "task.merge=false", "task.base=me/base", "task.license=mit")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert not (out / "model.safetensors").exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    torch.testing.assert_close(said(model), expected, rtol=0, atol=1e-5)
    found = front(out)
    assert (found["library_name"], found["base_model"], found["license"]) == ("peft", "me/base", "mit")
    assert found["base_model_relation"] == "adapter"


def test_all_weights_that_were_trained(tmp_path: Path, train: Any) -> None:
    folder, expected = train("algorithm=sft", "model.adapter=none", "ref_strategy=none", *OFFLINE, *KEEP)
    for words in (["task.step=null"], ["task.step=2"]):
        out = exported(tmp_path / words[0][-1], folder, *words)
        torch.testing.assert_close(said(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5)
        with safe_open(out / "model.safetensors", "pt") as tensors:
            assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118 (no mapping)
    with pytest.raises(ConfigError, match=r"task.merge: the run has trained all weights, .*: type task.merge=true"):
        exported(tmp_path / "adapter", folder, "task.merge=false")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_number_format_is_that_asked_for(tmp_path: Path, train: Any, dtype: str) -> None:
    folder, _ = train(*DPO)
    out = exported(tmp_path, folder, f"task.dtype={dtype}")
    with safe_open(out / "model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {getattr(torch, dtype)}  # noqa: SIM118
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert f"in {dtype}." in (out / "README.md").read_text()


def test_a_base_in_4_bit(tmp_path: Path, train: Any) -> None:
    """Merged into the rounded weights that the adapter was trained on; alone, with how the base has to be loaded."""
    folder, expected = train(*DPO, "strategy=qlora")
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, folder))
    assert model.dtype == torch.float32
    torch.testing.assert_close(said(model), expected, rtol=0, atol=1e-5)
    alone = exported(tmp_path / "alone", folder, "task.merge=false")
    base = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    assert "load_in_4bit=True" in (alone / "README.md").read_text()
    rounded = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings, dtype=torch.float32)
    for module in rounded.modules():  # on some CPUs bitsandbytes computes in bfloat16, whatever it was asked for
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    torch.testing.assert_close(said(PeftModel.from_pretrained(rounded, str(alone))), expected, rtol=0, atol=1e-5)


def test_a_reward_model(tmp_path: Path, train: Any) -> None:
    folder, expected = train("algorithm=reward_model", *OFFLINE, *KEEP)
    for words in (["task.step=null"], ["task.step=2"]):
        out = exported(tmp_path / words[0][-1], folder, *words)
        model = AutoModelForSequenceClassification.from_pretrained(out)
        torch.testing.assert_close(said(model), expected, rtol=0, atol=1e-5)
        assert AutoTokenizer.from_pretrained(out).pad_token_id == model.config.pad_token_id != 257
        assert front(out)["pipeline_tag"] == "text-classification"
    alone = exported(tmp_path / "alone", folder, "task.merge=false")
    base = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    start = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    start.config.pad_token_id = 0
    torch.testing.assert_close(said(PeftModel.from_pretrained(start, str(alone))), expected, rtol=0, atol=1e-5)


def test_a_process_reward_model(tmp_path: Path, train: Any) -> None:
    rows = [
        {"prompt": f"{a} + {b}?", "completions": [f"{a} + {b}", f"= {a + b + wrong}"], "labels": [True, not wrong]}
        for a in range(4)
        for b in range(4)
        for wrong in (0, 1)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=jsonl", f"data.path={tmp_path / 'steps.jsonl'}", "data.heldout=4"]
    folder, expected = train("algorithm=prm", *OFFLINE, *data)
    out = exported(tmp_path, folder)
    torch.testing.assert_close(said(AutoModelForTokenClassification.from_pretrained(out)), expected, rtol=0, atol=1e-5)
    assert "step-scorer" in front(out)["tags"]


def test_a_critic(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    critics: list[Critic] = []
    monkeypatch.setattr(ppo, "Critic", lambda kind: critics.append(Critic(kind)) or critics[-1])
    live: list[torch.Tensor] = []
    batch = collate([Example([5, 6, 7], [[8, 9, 10, 11]])])

    @torch.no_grad()
    def listen(self: Any) -> None:
        live.append(critics[-1](self.policy.eval(), batch)[0])

    monkeypatch.setattr(ppo.PPO, "on_fit_end", listen)
    words = ["algorithm.num_rollouts=2", "algorithm.num_prompts=2", "algorithm.group_size=4"]
    words += ["algorithm.microbatch_size=8", "rollout.max_new_tokens=4", "algorithm.critic_lr=1e-2"]
    words += ["algorithm.missing_eos_penalty=1"]  # something to be worth less than 0
    folder, expected = train("algorithm=ppo", *words)
    policy = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "policy", folder))
    torch.testing.assert_close(said(policy), expected, rtol=0, atol=1e-5)
    out = exported(tmp_path / "critic", folder, "task.part=critic")
    model = AutoModelForTokenClassification.from_pretrained(out).eval()
    with torch.no_grad():
        found = model(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0, 2:6, 0]
    assert live[0].abs().max() > 1e-4  # it starts at 0
    torch.testing.assert_close(found, live[0], rtol=0, atol=1e-5)
    assert "critic" in front(out)["tags"]
    with pytest.raises(ConfigError, match=r"task.merge: a critic is written whole"):
        exported(tmp_path / "x", folder, "task.part=critic", "task.merge=false")


def test_nothing_is_overwritten_and_nothing_left_half(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = train(*DPO)
    target, partial = tmp_path / "mine", tmp_path / ".mine.partial"
    target.mkdir()
    with pytest.raises(ConfigError, match=r"task.to: .*/mine is there already"):
        exported(tmp_path, folder, f"task.to={target}")
    target.rmdir()

    def breaks(policy: Any, folder: Path, *_: Any, **__: Any) -> bool:
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_model", breaks)
        with pytest.raises(OSError, match="No space left"):
            exported(tmp_path, folder, f"task.to={target}", f"output_dir={tmp_path / 'a'}")
    assert not target.exists() and not partial.exists()
    partial.mkdir()
    (partial / "leftover.txt").write_text("of an export that was killed")
    exported(tmp_path, folder, f"task.to={target}", f"output_dir={tmp_path / 'b'}")
    assert not (target / "leftover.txt").exists() and not partial.exists()


def test_what_is_no_finished_run_is_refused(tmp_path: Path, train: Any) -> None:
    with pytest.raises(ConfigError, match=r"task.run: .*/none holds no config.yaml"):
        exported(tmp_path, tmp_path / "none")
    folder, _ = train(*DPO)
    other = exported(tmp_path, folder).parent  # the folder of an export
    with pytest.raises(ConfigError, match=r"task.run: .* has trained nothing"):
        exported(tmp_path / "b", other)
    with pytest.raises(ConfigError, match=r"task.part: only algorithm=ppo trains a critic"):
        exported(tmp_path / "c", folder, "task.part=critic")
    cut = tmp_path / "cut"
    (cut / "checkpoints").mkdir(parents=True)
    (cut / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    (cut / "checkpoints/00000001.ckpt").write_bytes((folder / "checkpoints/00000001.ckpt").read_bytes())
    with pytest.raises(ConfigError, match=r"task.run: .* has not finished: type task.step=1 for its last checkpoint"):
        exported(tmp_path / "d", cut)
    assert (exported(tmp_path / "e", cut, "task.step=1") / "model.safetensors").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, train: Any) -> None:
    folder, _ = train(*DPO)
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    changed = (folder / "config.yaml").read_text().replace("num_layers: 2", "num_layers: 3")
    (other / "config.yaml").write_text(changed)
    (other / "checkpoints/00000001.ckpt").write_bytes((folder / "checkpoints/00000001.ckpt").read_bytes())
    with pytest.raises(UserError, match=r"task.step: .* does not fit the run's model, see .*layers\.2\."):
        exported(tmp_path, other, "task.step=1")


class Hub:
    """What is asked of the hub."""

    endpoint = "https://huggingface.co"
    asked: list[tuple[Any, ...]] = []
    breaks = False

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.asked.append(("create", repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.breaks:
            raise ConnectionError("no route")
        self.asked.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_it_is_uploaded_where_asked(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = train(*DPO)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(Hub, "asked", [])
    out = exported(tmp_path, folder, "task.push=me/mine", "task.private=false")
    assert Hub.asked[0] == ("create", "me/mine", False, True)
    assert Hub.asked[1] == ("upload", "me/mine", sorted(path.name for path in out.iterdir()))
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= set(Hub.asked[1][2])
    assert 'from_pretrained("me/mine")' in (out / "README.md").read_text()
    monkeypatch.setattr(Hub, "breaks", True)
    with pytest.raises(UserError, match=r"task.push: me/mine was not uploaded \(ConnectionError: no route\)") as caught:
        exported(tmp_path / "b", folder, "task.push=me/mine")
    assert f"hf upload me/mine {tmp_path / 'b' / 'out' / 'model'}" in str(caught.value)
    assert (tmp_path / "b" / "out" / "model" / "model.safetensors").exists()


def test_an_upload_that_cannot_work_is_refused_before_anything(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = train(*DPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"task.push: the hub cannot be reached"):
        exported(tmp_path, folder, "task.push=me/mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"task.push: nobody is signed in") as caught:
        exported(tmp_path, folder, "task.push=mine")
    assert "task.push: mine is no name of a repository" in str(caught.value)
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
def test_smollm2_after_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied embeddings, 135 million weights; its licence goes with it."""
    live: list[torch.Tensor] = []
    save = HFModel.save
    monkeypatch.setattr(HFModel, "save", lambda self, policy, *a: (live.append(said(policy)), save(self, policy, *a)))
    words = ["algorithm=dpo", "algorithm.batch_size=4", "algorithm.microbatch_size=4", "algorithm.max_steps=3"]
    words += ["trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
    run.run([*words, "algorithm.lr=1e-3", f"output_dir={tmp_path / 'run'}"])
    out = exported(tmp_path, tmp_path / "run")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = IDS[:, 1:, None]
    found, expected = (logprobs[:, :-1].gather(-1, tokens) for logprobs in (said(model), live[0]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(said(model), live[0], rtol=1e-5, atol=1e-5)  # down to -25, of 49,152 tokens
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    found = front(out)
    assert (found["base_model"], found["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert "Apache License" in (out / "LICENSE").read_text()
