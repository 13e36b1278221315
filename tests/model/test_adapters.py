from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from alignment.errors import UserError
from alignment.model.adapters import (
    adapter_off,
    adapter_parameters,
    add_reference_adapter,
    check_adapter_off_is_base,
    compact_frozen_linears,
    merged_weights,
    reference_problems,
    trainable_state,
    use_adapter,
)

IDS = torch.tensor([[3, 9, 27, 17, 51], [5, 25, 61, 41, 13]])


def adapted(model: LlamaForCausalLM, **settings: Any) -> PeftModel:
    """A policy whose adapter has an effect, as after some training; the given model is left alone."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    policy: Any = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    train(policy)
    return policy


def train(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def flags(policy: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in policy.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# ---- off, and on again ----------------------------------------------------------------------------------------------
SETTINGS = [
    {},
    {"use_dora": True},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    {"trainable_token_indices": [3, 9]},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_off_is_the_original_model_bit_for_bit(tiny_llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    policy = adapted(tiny_llama, **settings)
    on, before = logits(policy), flags(policy)
    with adapter_off(policy) as same:
        assert same is policy
        assert torch.equal(logits(policy), logits(tiny_llama))
        assert flags(policy) == before
    assert torch.equal(logits(policy), on)
    assert not torch.allclose(on, logits(tiny_llama))
    assert flags(policy) == before


def test_an_exception_leaves_the_adapter_as_it_was(tiny_llama: LlamaForCausalLM) -> None:
    policy = adapted(tiny_llama)
    add_reference_adapter(policy)
    on, before = logits(policy), flags(policy)
    for context in (adapter_off(policy), use_adapter(policy, "reference")):
        with pytest.raises(MemoryError), context:
            raise MemoryError
        assert torch.equal(logits(policy), on)
        assert flags(policy) == before


def test_an_inner_context_leaves_the_outer_one_in_force(tiny_llama: LlamaForCausalLM) -> None:
    policy = adapted(tiny_llama)
    add_reference_adapter(policy)
    reference = logits(policy)
    train(policy)
    on, off = logits(policy), logits(tiny_llama)
    with adapter_off(policy):
        with adapter_off(policy):
            assert torch.equal(logits(policy), off)
        assert torch.equal(logits(policy), off)
        with use_adapter(policy, "reference"):
            assert torch.equal(logits(policy), reference)
        assert torch.equal(logits(policy), off)
    with use_adapter(policy, "reference"):
        with adapter_off(policy):
            assert torch.equal(logits(policy), off)
        assert torch.equal(logits(policy), reference)
    assert torch.equal(logits(policy), on)


def test_gradients_pass_through_a_reference_pass_unchanged(tiny_llama: LlamaForCausalLM) -> None:
    """PEFT's own switch sets requires_grad; a reference pass between forward and backward must not be noticed."""

    def gradients(reference_pass: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        policy = adapted(tiny_llama)
        loss = policy(input_ids=IDS).logits.square().mean()
        if reference_pass:
            with adapter_off(policy):
                logits(policy)
        loss.backward()
        return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

    plain, interrupted = gradients(False), gradients(True)
    assert plain.keys() == interrupted.keys()
    assert len(plain) == 28  # A and B of 7 linear layers in 2 blocks
    assert all(torch.equal(plain[name], interrupted[name]) for name in plain)


def test_switching_needs_an_adapter_that_is_not_merged(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match=r"model.adapter=lora"), adapter_off(tiny_llama):
        pass
    with pytest.raises(UserError, match=r"model.adapter=lora"), use_adapter(tiny_llama, "reference"):
        pass
    policy = adapted(tiny_llama)
    with (
        pytest.raises(UserError, match=r"no adapter 'reference', only \['default'\]"),
        use_adapter(policy, "reference"),
    ):
        pass
    policy.merge_adapter()
    with pytest.raises(UserError, match="merged"), adapter_off(policy):
        pass


# ---- as a reference -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "eva"])
def test_inits_that_change_the_base_are_named(init: str) -> None:
    (problem,) = reference_problems({"init_lora_weights": init})
    assert f"init_lora_weights={init}" in problem


def test_trained_biases_are_named() -> None:
    problems = reference_problems({"init_lora_weights": "olora", "bias": "all"})
    assert len(problems) == 2
    assert "bias=all" in problems[1]


@pytest.mark.parametrize("lora", [{}, {"bias": "none"}, {"init_lora_weights": True}, {"init_lora_weights": "gaussian"}])
def test_other_settings_leave_the_base_alone(lora: dict[str, Any]) -> None:
    assert reference_problems(lora) == []


@pytest.mark.parametrize("settings", [*SETTINGS, {"init_lora_weights": "gaussian"}])
def test_a_sound_policy_passes_the_check(tiny_llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    check_adapter_off_is_base(adapted(tiny_llama, **settings))


def test_a_policy_whose_base_moves_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    policy: Any = adapted(tiny_llama)
    policy.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"1 weights of the base .*model.norm.weight.*ref_strategy=frozen"):
        check_adapter_off_is_base(policy)
    pissa = adapted(tiny_llama, init_lora_weights="pissa")
    with adapter_off(pissa):  # the fact behind the refusal
        assert not torch.allclose(logits(pissa), logits(tiny_llama))
    with pytest.raises(UserError, match="init_lora_weights=pissa"):
        check_adapter_off_is_base(pissa)


@pytest.mark.parametrize("settings", [*SETTINGS[:4], {"init_lora_weights": "pissa"}, {"lora_dropout": 0.5}])
def test_the_reference_adapter_stays_where_the_policy_was(
    tiny_llama: LlamaForCausalLM, settings: dict[str, Any]
) -> None:
    policy = adapted(tiny_llama, **settings).eval()
    start, before, random = logits(policy), flags(policy), torch.get_rng_state()
    base = {name: tensor.clone() for name, tensor in policy.named_parameters() if not before[name]}
    add_reference_adapter(policy)
    assert torch.equal(torch.get_rng_state(), random)
    after = flags(policy)
    assert {name: after[name] for name in before} == before
    assert not any(after[name] for name in after.keys() - before.keys())
    assert all(torch.equal(tensor, policy.get_parameter(name)) for name, tensor in base.items())
    assert torch.equal(logits(policy), start)
    train(policy.train())
    with use_adapter(policy, "reference"):
        torch.testing.assert_close(logits(policy), start, rtol=0, atol=0)
    assert not torch.allclose(logits(policy.eval()), start)


def test_adding_a_reference_leaves_flags_set_by_hand(tiny_llama: LlamaForCausalLM) -> None:
    policy: Any = adapted(tiny_llama)
    layer = policy.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A["default"].weight.requires_grad_(False)
    policy.base_model.model.model.norm.weight.requires_grad_(True)
    before = flags(policy)
    add_reference_adapter(policy)
    after = flags(policy)
    assert {name: after[name] for name in before} == before


def test_two_adapters_are_paired_by_name(tiny_llama: LlamaForCausalLM) -> None:
    policy = adapted(tiny_llama, use_dora=True, modules_to_save=["lm_head"], target_modules=["q_proj", "embed_tokens"])
    add_reference_adapter(policy)
    own, other = adapter_parameters(policy), adapter_parameters(policy, "reference")
    assert own.keys() == other.keys()
    assert len(own) == len(trainable_state(policy)) == 3 * 3 + 1  # A, B and magnitude of 3 layers, and the head
    assert all(torch.equal(own[name], other[name]) and own[name] is not other[name] for name in own)


# ---- merged ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_merged_weights_are_the_same_model(tiny_llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    policy = adapted(tiny_llama, **settings)
    before = weights(policy)
    plain = LlamaForCausalLM(tiny_llama.config).eval()
    plain.load_state_dict(dict(merged_weights(policy)))  # strict: every name, no other
    torch.testing.assert_close(logits(plain), logits(policy), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(plain), logits(tiny_llama), atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / 4**0.5)])
def test_a_merged_weight_is_w_plus_scaled_ba(tiny_llama: LlamaForCausalLM, use_rslora: bool, scale: float) -> None:
    """LoRA (2106.09685) section 4.1: alpha / r; rsLoRA (2312.03732) eq. 6: alpha / sqrt(r)."""
    policy: Any = adapted(tiny_llama, use_rslora=use_rslora)
    layer = policy.base_model.model.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    w = tiny_llama.get_parameter("model.layers.1.mlp.up_proj.weight")
    merged = dict(merged_weights(policy))["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(merged, (w + scale * b @ a).detach())


def test_biases_merge_too(tiny_llama: LlamaForCausalLM) -> None:
    config = copy.deepcopy(tiny_llama.config)
    config.attention_bias = True
    biased = LlamaForCausalLM(config)
    for settings in ({"lora_bias": True}, {"bias": "lora_only"}):
        policy = adapted(biased, target_modules=["q_proj", "v_proj"], **settings)
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(dict(merged_weights(policy)))
        torch.testing.assert_close(logits(plain), logits(policy), rtol=1e-5, atol=1e-6)


def test_only_what_can_change_on_request(tiny_llama: LlamaForCausalLM) -> None:
    policy = adapted(tiny_llama, target_modules=["q_proj"], modules_to_save=["lm_head"])
    names = {name for name, _ in merged_weights(policy, changed_only=True)}
    assert names == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)} | {"lm_head.weight"}
    plain = copy.deepcopy(tiny_llama)
    plain.load_state_dict(dict(merged_weights(policy, changed_only=True)), strict=False)
    torch.testing.assert_close(logits(plain), logits(policy), rtol=1e-5, atol=1e-6)


def test_a_model_without_adapter_gives_all_it_has(tiny_llama: LlamaForCausalLM) -> None:
    for changed_only in (False, True):
        assert dict(merged_weights(tiny_llama, changed_only=changed_only)).keys() == tiny_llama.state_dict().keys()


def test_switched_off_or_in_place_merged_gives_what_forward_computes(tiny_llama: LlamaForCausalLM) -> None:
    policy = adapted(tiny_llama, modules_to_save=["lm_head"])
    with adapter_off(policy):
        off = dict(merged_weights(policy))
    assert all(torch.equal(off[name], tensor) for name, tensor in tiny_llama.state_dict().items())
    once = dict(merged_weights(policy))
    policy.merge_adapter()
    for name, tensor in merged_weights(policy):
        torch.testing.assert_close(tensor, once[name])


@pytest.mark.parametrize(
    "settings",
    [{"trainable_token_indices": [3]}, {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]}],
)
def test_what_cannot_be_merged_is_refused(tiny_llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be merged"):
        list(merged_weights(adapted(tiny_llama, **settings)))


# ---- compact --------------------------------------------------------------------------------------------------------
def autocast_pass(policy: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        out = policy(input_ids=IDS, use_cache=False).logits
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"target_modules": ["q_proj", "down_proj"]}, {"modules_to_save": ["lm_head"]}]
)
def test_compact_weights_change_no_bit_under_autocast(
    tiny_llama: LlamaForCausalLM, tied: bool, settings: dict[str, Any]
) -> None:
    config = copy.deepcopy(tiny_llama.config)
    config.attention_bias, config.tie_word_embeddings = True, tied
    base = LlamaForCausalLM(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    policy = adapted(base, **settings)
    compact: Any = copy.deepcopy(policy)
    assert compact_frozen_linears(compact, torch.bfloat16) == 14  # 7 in 2 blocks; never the head
    (expected, expected_grads), (out, grads) = autocast_pass(policy), autocast_pass(compact)
    assert torch.equal(out, expected)
    assert grads.keys() == expected_grads.keys() != set()
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)
    half = {name for name, p in compact.named_parameters() if p.dtype == torch.bfloat16}
    assert all("_proj" in name and "lora_" not in name for name in half)
    assert len(half) == 14 + 2 * 4  # and the biases of q, k, v, o
    with adapter_off(compact), adapter_off(policy), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(compact), logits(policy))


def test_what_trains_or_is_read_otherwise_stays(tiny_llama: LlamaForCausalLM) -> None:
    assert compact_frozen_linears(copy.deepcopy(tiny_llama), torch.bfloat16) == 0
    dora = adapted(tiny_llama, use_dora=True, target_modules=["q_proj"])
    assert compact_frozen_linears(dora, torch.bfloat16) == 12  # all but the two q_proj, whose norm is taken in float32
    plain = copy.deepcopy(tiny_llama).requires_grad_(False)
    assert compact_frozen_linears(plain, torch.bfloat16) == 14
    assert plain.lm_head.weight.dtype == plain.model.norm.weight.dtype == torch.float32
    assert compact_frozen_linears(plain, torch.bfloat16) == 0
