"""What is written as a plain folder computes what the trained model did, in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from alignment.batch import Example, collate
from alignment.errors import UserError
from alignment.model.adapters import merged_weights
from alignment.model.critic import Critic
from alignment.model.export import cast, without_copies, write_adapter, write_critic, write_model
from alignment.model.logprobs import completion_states
from alignment.model.tiny import Tiny
from alignment.strategy.qlora import QLoRA

IDS = torch.tensor([[72, 101, 108, 108, 111, 32, 50, 43, 50]])
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


def names_in(folder: Path) -> dict[str, torch.dtype]:
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118 (no mapping)


def written(source: Tiny, policy: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> bool:
    return write_model(policy, folder, source.tokenizer, dtype=dtype, stop_ids=source.stop_ids)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_a_merged_folder_computes_what_the_adapter_did(tmp_path: Path, more: dict[str, Any]) -> None:
    source = Tiny(lora=LORA | more)
    policy = source.policy()
    expected = logits(policy)
    assert written(source, policy, tmp_path)
    torch.testing.assert_close(logits(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(policy), expected, rtol=0, atol=0)
    assert (expected - logits(source.frozen())).abs().max() > 1e-2
    assert "lm_head.weight" not in names_in(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_adapter_on_both_ends_of_a_tie_keeps_it(tmp_path: Path) -> None:
    source = Tiny(lora=LORA | {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True})
    policy = source.policy()
    with torch.no_grad():  # peft draws those of embeddings from N(0, 1)
        for parameter in (p for p in policy.parameters() if p.requires_grad):
            parameter.mul_(0.1)
    expected = logits(policy)
    assert written(source, policy, tmp_path)
    assert "lm_head.weight" not in names_in(tmp_path)
    model = loaded(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_on_one_end_of_a_tie_unties_it_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such adapters are refused in training here; one from elsewhere may be so. A tied folder would lose the head."""
    source = Tiny(adapter="none")
    base: Any = source.policy()
    settings = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    policy = get_peft_model(base, settings)
    expected = logits(policy)
    assert not written(source, policy, tmp_path)
    assert "trained apart" in caplog.text
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names_in(tmp_path).keys()
    torch.testing.assert_close(logits(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
    assert base.config.tie_word_embeddings is True


def test_weights_in_4_bit_are_dequantised_also_where_no_adapter_is(tmp_path: Path) -> None:
    source = Tiny(lora=LORA | {"target_modules": ["q_proj", "down_proj"]})
    QLoRA().prepare(source)
    policy = source.policy()
    expected = logits(policy)
    assert written(source, policy, tmp_path)
    assert set(names_in(tmp_path).values()) == {torch.float32}
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    torch.testing.assert_close(logits(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
    source.quantization_config = None
    rounded = dict(merged_weights(policy))["model.layers.0.self_attn.k_proj.weight"]
    exact = source.frozen().get_parameter("model.layers.0.self_attn.k_proj.weight")
    assert 0 < (rounded - exact).abs().max() < 0.1  # rounded, not the checkpoint's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_number_format_is_that_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    source = Tiny(lora=LORA)
    policy = source.policy()
    written(source, policy, tmp_path, dtype)
    assert set(names_in(tmp_path).values()) == {dtype}
    assert loaded(tmp_path).dtype == dtype
    stored = loaded(tmp_path).model.layers[0].mlp.up_proj.weight
    assert torch.equal(stored, dict(merged_weights(policy))["model.layers.0.mlp.up_proj.weight"].to(dtype))


def test_a_number_that_float16_cannot_hold_is_refused() -> None:
    with pytest.raises(UserError, match=r"task.dtype: big has numbers that torch.float16 cannot hold"):
        cast({"big": torch.tensor([1e6])}, torch.float16)


def test_sampling_ends_where_training_ended_it(tmp_path: Path) -> None:
    source = Tiny(lora=LORA)
    write_model(source.policy(), tmp_path, source.tokenizer, dtype=torch.float32, stop_ids={257, 10})
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [10, 257]
    assert settings["pad_token_id"] == source.tokenizer.pad_token_id


def test_an_adapter_alone_has_the_base_and_the_format_asked_for(tmp_path: Path) -> None:
    source = Tiny(lora=LORA)
    policy: Any = source.policy()
    before = policy.peft_config["default"].base_model_name_or_path
    write_adapter(policy, tmp_path, source.tokenizer, dtype=torch.bfloat16, base="somebody/base")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "somebody/base"
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert policy.peft_config["default"].base_model_name_or_path == before
    assert next(p for n, p in policy.named_parameters() if "lora_A" in n).dtype == torch.float32


@pytest.mark.parametrize("kind", ["adapter", "model", "head", "detached_head"])
def test_a_critic_of_any_kind_gives_its_values_in_plain_transformers(tmp_path: Path, kind: Any) -> None:
    """Its value before a completion token is the folder's logit at the token before."""
    source = Tiny(lora=LORA)
    policy, critic = source.policy().eval(), Critic(kind)
    critic.attach(source, policy)
    with torch.no_grad():
        for parameter in critic.trained(policy):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = collate([Example([5, 6, 7], [[8, 9, 10, 11]])])
    with torch.no_grad():
        if critic.reads_policy:
            expected = critic._values(completion_states(policy, batch), batch)
        else:
            expected = critic(policy, batch)
    write_critic(critic, policy, tmp_path, source.tokenizer, dtype=torch.float32, stop_ids=source.stop_ids)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = model(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0, 2:6, 0]
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)


def test_copies_are_told_by_their_values(tiny_llama: Any) -> None:
    tiny_llama.all_tied_weights_keys = {"b": "a"}
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-7])
    assert without_copies(tiny_llama, {"a": one, "b": other})[0].keys() == {"a"}
    assert without_copies(tiny_llama, {"a": one, "b": other + 1})[0].keys() == {"a", "b"}
    assert without_copies(tiny_llama, {"a": one})[1]
