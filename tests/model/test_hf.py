from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTConfig,
)

from alignment.errors import UserError
from alignment.model.adapters import add_reference_adapter
from alignment.model.hf import HFModel, _set_dropout, check_written
from alignment.model.tiny import CHAT_TEMPLATE, Tiny

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
IDS = torch.tensor([[72, 101, 108, 108, 111], [50, 43, 51, 61, 53]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with tied embeddings, a generation config and a ChatML tokenizer."""
    return Tiny(path=str(tmp_path_factory.mktemp("models"))).folder


@pytest.fixture
def mutable(folder: str, tmp_path: Path) -> Path:
    """A copy of that folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def train(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)


def trained_names(policy: nn.Module) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


# ---- settings -------------------------------------------------------------------------------------------------------
def test_settings_and_defaults_are_those_of_the_yaml() -> None:
    conf = yaml.safe_load((CONF / "hf.yaml").read_text())
    fields = {f.name: f for f in dataclasses.fields(HFModel)}
    assert conf.keys() - {"_target_"} == fields.keys()
    defaults = {name: f.default for name, f in fields.items() if name not in ("path", "lora")}
    assert {name: conf[name] for name in defaults} == defaults
    HFModel("anywhere", lora=conf["lora"])


def test_making_one_loads_nothing() -> None:
    source = HFModel("/no/such/folder")
    with pytest.raises(UserError, match="no folder /no/such/folder"):
        source.policy()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": "qlora"}, "model.adapter: 'qlora'.*model.adapter=lora or model.adapter=none"),
        ({"adapter": "none", "adapter_path": "x"}, "model.adapter_path: needs an adapter: type model.adapter=lora"),
        ({"lora": {"rank": 8}}, "model.lora.rank: .*type ~model.lora.rank"),
        ({"lora": {"init_lora_weights": "eva"}}, "eva: it has to see data.*model.lora.init_lora_weights=true"),
        ({"lora": {"init_lora_weights": "pissa_niter_4"}}, "cannot be repeated.*model.lora.init_lora_weights=pissa"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HFModel("anywhere", **settings)


# ---- where it is ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "model.path: missing: type model.path=<folder or hub name>, or model=smollm2"),
        ("./models/mine", r"there is no folder ./models/mine: type model.path="),
        ("a/b/c", "there is no folder a/b/c: type model.path="),
        ("nobody/nothing", "nobody/nothing cannot be loaded .*the hub does not.*type model.path=.*model=smollm2"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_to_type(path: str | None, message: str) -> None:
    source = HFModel(path)
    for build in (source.policy, source.frozen, lambda: source.tokenizer, lambda: source.stop_ids):
        with pytest.raises(UserError, match=message):
            build()


def test_folders_of_another_kind_say_what_to_type(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config.json: type model.path="):
        HFModel(str(tmp_path / "empty")).policy()
    source = HFModel(folder)
    source.save(source.policy(), tmp_path / "adapter")
    with pytest.raises(UserError, match=f"model.path={folder} model.adapter_path={tmp_path}/adapter"):
        HFModel(str(tmp_path / "adapter")).policy()


def test_a_folder_without_weights_is_named(mutable: Path) -> None:
    (mutable / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"not all files are there.*model.safetensors"):
        HFModel(str(mutable)).policy()


# ---- tokens ---------------------------------------------------------------------------------------------------------
def test_the_template_is_left_alone_unless_one_is_given(folder: str, tmp_path: Path) -> None:
    assert HFModel(folder).tokenizer.chat_template == CHAT_TEMPLATE
    text = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(text)
    for given in (text, str(tmp_path / "template.jinja")):
        tokenizer = HFModel(folder, chat_template=given).tokenizer
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user]hi"
    with pytest.raises(UserError, match=r"model.chat_template: there is no file nowhere.jinja"):
        _ = HFModel(folder, chat_template="nowhere.jinja").tokenizer


def test_a_missing_pad_token_becomes_eos_and_adds_none(mutable: Path) -> None:
    size = len(HFModel(str(mutable)).tokenizer)
    edit(mutable / "tokenizer_config.json", pad_token="absent")
    assert AutoTokenizer.from_pretrained(mutable).pad_token_id is None
    tokenizer = HFModel(str(mutable)).tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257
    assert len(tokenizer) == size
    edit(mutable / "tokenizer_config.json", eos_token="absent")
    with pytest.raises(UserError, match="no pad, EOS or unknown token"):
        _ = HFModel(str(mutable)).tokenizer


def test_the_tokenizer_is_kept(folder: str) -> None:
    source = HFModel(folder)
    assert source.tokenizer is source.tokenizer


def test_stop_ids_come_from_every_place_that_names_one(mutable: Path) -> None:
    assert HFModel(str(mutable)).stop_ids == {257}
    edit(mutable / "config.json", eos_token_id=2)
    edit(mutable / "generation_config.json", eos_token_id=[5, 7])
    assert HFModel(str(mutable)).stop_ids == {257, 2, 5, 7}
    (mutable / "generation_config.json").unlink()
    assert HFModel(str(mutable)).stop_ids == {257, 2}


# ---- the policy -----------------------------------------------------------------------------------------------------
def test_an_adapter_is_all_that_trains(folder: str) -> None:
    policy = HFModel(folder, dtype="bfloat16", lora={"r": 4}).policy()
    trained = trained_names(policy)
    assert len(trained) == 2 * 7 * 2  # A and B of 7 linear layers in 2 blocks
    assert all(".lora_" in name for name in trained)
    assert all(module.training for module in policy.modules())
    dtypes = {(p.requires_grad, p.dtype) for p in policy.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_what_is_saved_beside_the_adapter_is_float32_too(folder: str) -> None:
    lora = {"modules_to_save": ["norm"]}
    policy = HFModel(folder, dtype="bfloat16", lora=lora).policy()
    kinds = {p.dtype for name, p in policy.named_parameters() if "modules_to_save" in name}
    assert kinds == {torch.float32}


def test_half_of_a_tied_pair_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match=r"model.lora.ensure_weight_tying=true"):
        HFModel(folder, lora={"modules_to_save": ["lm_head"]}).policy()
    source = HFModel(folder, lora={"modules_to_save": ["lm_head"], "ensure_weight_tying": True})
    assert trained_names(source.policy()) == trained_names(source.policy())  # peft extends the list it is given


def test_unknown_targets_are_refused(folder: str) -> None:
    with pytest.raises(UserError, match=r"model.lora: .*nonesuch.*type model.lora"):
        HFModel(folder, lora={"target_modules": ["nonesuch"]}).policy()


def test_without_adapter_everything_trains(folder: str) -> None:
    policy = HFModel(folder, adapter="none").policy()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in policy.parameters())
    assert all(module.training for module in policy.modules())


def test_a_fresh_adapter_depends_on_the_seed_alone(folder: str) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return {name: p.detach() for name, p in HFModel(folder).policy().named_parameters() if "lora_A" in name}

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_containers_of_the_config_library_end_in_plain_json(folder: str, tmp_path: Path) -> None:
    lora = OmegaConf.create({"r": 2, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 1}})
    source = HFModel(folder, lora=lora)  # pyright: ignore
    source.save(source.policy(), tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["q_proj", "v_proj"]
    assert written["rank_pattern"] == {"q_proj": 1}
    assert written["base_model_name_or_path"] == folder


@pytest.fixture(scope="module")
def gpt2(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 whose config has dropout 0.1 in three places, as on the hub."""
    place = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=258, n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=257)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(place)
    AutoTokenizer.from_pretrained(folder).save_pretrained(place)
    return str(place)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_no_dropout_unless_asked_for(gpt2: str, adapter: Any) -> None:
    """B28: policy and reference agree at the first step, in train mode."""
    source = HFModel(gpt2, adapter=adapter)
    policy, reference = source.policy(), source.frozen()
    assert policy.training
    assert torch.equal(logits(policy), logits(policy))
    assert torch.equal(logits(policy), logits(reference))
    noisy = HFModel(gpt2, adapter=adapter, dropout=0.3).policy()
    assert {m.p for m in noisy.modules() if isinstance(m, nn.Dropout) and ".lora" not in str(type(m))} == {0.3}
    assert not torch.equal(logits(noisy), logits(noisy))


def test_layer_drop_is_never_switched_on() -> None:
    config = OPTConfig(dropout=0.1, layerdrop=0.2, attention_dropout=0.0)
    _set_dropout(config, 0.3)
    assert (config.dropout, config.attention_dropout, config.layerdrop) == (0.3, 0.3, 0.0)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_checkpointing_gives_the_same_gradients(folder: str, adapter: Any) -> None:
    """B65: frozen inputs must not stop gradients; and the layers must really be computed twice."""

    def gradients(checkpointing: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        policy: Any = HFModel(folder, adapter=adapter, gradient_checkpointing=checkpointing).policy()
        calls: list[int] = []
        for name, module in policy.named_modules():
            if name.endswith(".self_attn"):
                module.register_forward_hook(lambda *_: calls.append(1))
        policy(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}, len(calls)

    (plain, once), (checkpointed, twice) = gradients(False), gradients(True)
    assert (once, twice) == (2, 4)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-7)
        assert gradient.abs().max() > 0 or "lora_A" in name  # A's are 0 while B is


def test_checkpointing_leaves_generation_alone(folder: str) -> None:
    def sampled(checkpointing: bool) -> Tensor:
        torch.manual_seed(0)
        policy: Any = HFModel(folder, gradient_checkpointing=checkpointing).policy()
        train(policy)
        return policy.eval().generate(input_ids=IDS, max_new_tokens=8, do_sample=False)

    assert torch.equal(sampled(True), sampled(False))


# ---- the frozen copy ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_the_frozen_copy_is_the_starting_point_and_stays_there(folder: str, adapter: Any) -> None:
    source = HFModel(folder, adapter=adapter)
    policy, frozen = source.policy(), source.frozen()
    start = logits(policy)
    assert torch.equal(logits(frozen), start)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(module.training for module in frozen.modules())
    train(policy)
    assert torch.equal(logits(frozen), start)
    assert not torch.allclose(logits(policy), start)


@pytest.fixture
def sft(folder: str, tmp_path: Path) -> tuple[Path, Tensor]:
    """An adapter trained with dropout, as an earlier stage would leave it, and its logits."""
    source = HFModel(folder, lora={"r": 2, "lora_alpha": 4, "lora_dropout": 0.5})
    policy = source.policy()
    train(policy)
    source.save(policy, tmp_path / "sft")
    return tmp_path / "sft", logits(policy.eval())


def test_training_goes_on_from_an_adapter(folder: str, sft: tuple[Path, Tensor]) -> None:
    path, expected = sft
    source = HFModel(folder, adapter_path=str(path), dtype="float32")
    policy, frozen = source.policy(), source.frozen()
    assert torch.equal(logits(policy), expected)  # in train mode: the old dropout is off
    assert torch.equal(logits(frozen), expected)
    assert len(trained_names(policy)) == 28
    assert not any(p.requires_grad for p in frozen.parameters())
    train(policy)
    assert torch.equal(logits(frozen), expected)


def test_an_adapter_that_is_none_or_is_cut_short_is_refused(folder: str, sft: tuple[Path, Tensor], gpt2: str) -> None:
    path, _ = sft
    for base, adapter in ((folder, "/nowhere"), (folder, folder), (gpt2, str(path))):
        with pytest.raises(UserError, match=r"model.adapter_path: .*type model.adapter_path="):
            HFModel(base, adapter_path=adapter).policy()
    tensors = load_file(path / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="missing adapter keys"):
        HFModel(folder, adapter_path=str(path)).frozen()


# ---- compact --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("frozen_dtype", "precision", "stored"),
    [
        ("auto", "bf16-mixed", torch.bfloat16),
        ("auto", "16-mixed", torch.float16),
        ("auto", "32-true", torch.float32),
        ("auto", None, torch.float32),
        ("bfloat16", "bf16-mixed", torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        (None, "bf16-mixed", torch.float32),
    ],
)
def test_frozen_linears_are_stored_as_the_precision_rounds_them(
    folder: str, frozen_dtype: Any, precision: str | None, stored: torch.dtype
) -> None:
    source = HFModel(folder, frozen_dtype=frozen_dtype)
    if precision:
        source.compact_for(precision)
    policy, frozen = source.policy(), source.frozen()
    assert policy.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight").dtype == stored
    assert frozen.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == stored
    for model in (policy, frozen):
        others = {p.dtype for name, p in model.named_parameters() if "_proj" not in name or "lora_" in name}
        assert others == {torch.float32}


def test_policy_and_frozen_copy_agree_bit_for_bit_under_autocast(folder: str) -> None:
    compact, plain = HFModel(folder, frozen_dtype="bfloat16"), HFModel(folder, frozen_dtype=None)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(plain.policy())
        assert torch.equal(logits(compact.policy()), expected)
        assert torch.equal(logits(compact.frozen()), expected)


def test_a_storage_that_would_change_numbers_is_refused() -> None:
    for precision in ("32-true", "16-mixed", "bf16-true"):
        with pytest.raises(UserError, match=r"model.frozen_dtype: bfloat16 fits only.*type model.frozen_dtype=auto"):
            HFModel("anywhere", frozen_dtype="bfloat16").compact_for(precision)


# ---- in 4 bit -------------------------------------------------------------------------------------------------------
def nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def test_a_4_bit_base_keeps_its_gradients_after_an_eval_pass(folder: str) -> None:
    """bitsandbytes 0.50 on CPUs with AVX512-BF16 loses them, silently, unless told not to repack."""

    def gradients(eval_pass: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        policy: Any = HFModel(folder).policy(quantization_config=nf4())
        layer = policy.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer")
        assert type(layer).__name__ == "Linear4bit"
        if eval_pass:
            logits(policy.eval())
            policy.train()
        policy(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}

    before, after = gradients(False), gradients(True)
    assert any(gradient.abs().max() > 0 for gradient in before.values())
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient)


def test_4_bit_is_4_bit_or_refused(folder: str) -> None:
    for config, dtype in ((nf4(), torch.uint8), (BitsAndBytesConfig(load_in_8bit=True), torch.int8)):
        frozen: Any = HFModel(folder, adapter="none").frozen(config)
        assert frozen.model.layers[0].mlp.up_proj.weight.dtype == dtype
        assert not any(p.requires_grad for p in frozen.parameters())
        assert not frozen.training
        torch.testing.assert_close(logits(frozen), logits(HFModel(folder).frozen()), rtol=0, atol=0.1)
    with pytest.raises(UserError, match=r"cannot be trained themselves: type model.adapter=lora"):
        HFModel(folder, adapter="none").policy(quantization_config=nf4())


# ---- saving ---------------------------------------------------------------------------------------------------------
def test_a_saved_model_is_loaded_by_transformers_as_it_is(folder: str, tmp_path: Path) -> None:
    source = HFModel(folder, adapter="none", gradient_checkpointing=True)
    policy = source.policy()
    train(policy)
    source.save(policy, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(policy.eval()))
    assert loaded.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == CHAT_TEMPLATE
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == 257
    assert torch.equal(logits(HFModel(str(tmp_path / "model")).policy()), logits(policy))


@pytest.mark.parametrize(
    "lora",
    [{}, {"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["norm"]}],
)
@pytest.mark.parametrize("frozen_dtype", [None, "bfloat16"])
def test_a_saved_adapter_is_loaded_by_peft_as_it_is(
    folder: str, tmp_path: Path, lora: dict[str, Any], frozen_dtype: Any
) -> None:
    source = HFModel(folder, lora={"r": 4, **lora}, frozen_dtype=frozen_dtype)
    policy = source.policy()
    add_reference_adapter(policy)
    train(policy)
    source.save(policy, tmp_path)
    base = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    with torch.autocast("cpu", torch.bfloat16, enabled=frozen_dtype is not None):
        assert torch.equal(logits(loaded), logits(policy.eval()))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == CHAT_TEMPLATE
    assert not (tmp_path / "reference").exists()
    assert not any("reference" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_gathered_weights_are_written_in_place_of_live_shards(folder: str, tmp_path: Path, adapter: Any) -> None:
    source = HFModel(folder, adapter=adapter)
    policy = source.policy()
    whole = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    expected = logits(policy)
    for parameter in policy.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(UserError, match=r"empty|not usable"):
        source.save(policy, tmp_path / "shards")
    source.save(policy, tmp_path / "whole", state_dict=whole)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")  # an adapter's folder names its base
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_one_empty_tensor_is_an_error(folder: str, tmp_path: Path, adapter: Any) -> None:
    source = HFModel(folder, adapter=adapter)
    policy = source.policy()
    victim = sorted(trained_names(policy))[3]
    policy.get_parameter(victim).data = torch.empty(0)
    with pytest.raises(UserError, match=r"empty|not usable"):
        source.save(policy, tmp_path)


def test_trained_weights_outside_the_adapter_are_not_lost_silently(folder: str, tmp_path: Path) -> None:
    source = HFModel(folder)
    policy: Any = source.policy()
    policy.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"1 trained weights .*would not be saved .*model.norm.weight"):
        source.save(policy, tmp_path)
    biased = HFModel(folder, lora={"bias": "all"})
    biased.save(biased.policy(), tmp_path)


def test_what_was_written_is_compared(folder: str, tmp_path: Path) -> None:
    live = load_file(Path(folder) / "model.safetensors")
    check_written(Path(folder), live)
    name, other = sorted(live)[1], sorted(live)[2]
    changed = {**live, name: live[name] + 1}
    with pytest.raises(UserError, match=f"{name} differs from the live one"):
        check_written(Path(folder), changed)
    with pytest.raises(UserError, match=f"{name} has another shape"):
        check_written(Path(folder), {**live, name: live[name][:1]})
    with pytest.raises(UserError, match="extra is missing"):
        check_written(Path(folder), {**live, "extra": torch.ones(3)})
    check_written(Path(folder), {**live, "tied": live[name]})
    save_file({**live, other: torch.empty(0)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{other} is empty"):
        check_written(tmp_path, live)


def test_a_class_that_writes_under_other_names_must_write_everything(tmp_path: Path) -> None:
    live = {"experts": torch.arange(6.0).view(2, 3), "norm": torch.ones(2)}
    written = {"expert.0": torch.arange(3.0), "expert.1": torch.arange(3.0, 6.0), "norm": torch.ones(2)}
    save_file(written, tmp_path / "a.safetensors")
    check_written(tmp_path, live)
    del written["expert.1"]
    save_file(written, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="experts is missing"):
        check_written(tmp_path, live)


def test_an_invalid_generation_config_does_not_stop_saving(mutable: Path, tmp_path: Path) -> None:
    """Temperature beside do_sample=False is common on the hub, and save_pretrained refuses it: after the training."""
    edit(mutable / "generation_config.json", do_sample=False, temperature=0.6)
    source = HFModel(str(mutable), adapter="none")
    source.save(source.policy(), tmp_path / "out")
    written = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (written.do_sample, written.temperature) == (True, 0.6)


def test_two_policies_share_nothing(folder: str) -> None:
    source = HFModel(folder, adapter="none")
    first, second = source.policy(), source.policy()
    before = copy.deepcopy(second.state_dict())
    train(first)
    assert all(torch.equal(before[name], tensor) for name, tensor in second.state_dict().items())
    assert isinstance(first, LlamaForCausalLM)
