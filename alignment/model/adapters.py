"""What a policy with a LoRA adapter can do besides training: switch it off, carry a second one, be merged, be compact.

Contexts and merging touch neither the base weights nor any `requires_grad` flag, so they may run between two training
steps, under any optimizer and any wrapper.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from alignment.errors import UserError

POLICY, REFERENCE, CRITIC, REWARD = "default", "reference", "critic", "reward"
# Initialisations that take something out of the base weights and put it into the adapter (pissa also as pissa_niter_4).
CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
# Parts of parameter names that only adapters have.
ADAPTER_PARTS = (".lora_", ".modules_to_save.", ".trainable_tokens_")


# ---- which adapter is on --------------------------------------------------------------------------------------------
@contextmanager
def adapter_off(policy: nn.Module) -> Iterator[nn.Module]:
    """The policy without its adapter, for as long as the context lasts.

    Every layer's former state comes back whatever happens inside, also an exception or another of these contexts.
    PEFT's own `disable_adapter` switches requires_grad off and on again as well; this one leaves it alone, so
    gradients, hooks and sharded parameters do not notice. Raises UserError where there is no adapter, or where it is
    merged into the base.
    """
    with _restored(policy) as layers:
        for layer in layers:
            layer._disable_adapters = True
        yield policy


@contextmanager
def use_adapter(policy: nn.Module, name: str) -> Iterator[nn.Module]:
    """The policy with the adapter `name` instead of its own; restores like `adapter_off`."""
    known = _peft(policy).peft_config
    if name not in known:
        raise UserError(f"the policy has no adapter {name!r}, only {sorted(known)}")
    with _restored(policy) as layers:
        for layer in layers:
            layer._active_adapter = name if isinstance(layer, ModulesToSaveWrapper) else [name]
            layer._disable_adapters = False
        yield policy


@contextmanager
def _restored(policy: nn.Module) -> Iterator[list[Any]]:
    """All layers that have adapters; which one is active, and whether it is, is put back at the end."""
    layers: list[Any] = [m for m in policy.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if not layers:
        raise UserError("the policy has no adapter: type model.adapter=lora, or ref_strategy=frozen")
    if any(layer.merged_adapters for layer in layers):
        raise UserError("the adapter is merged into the base weights, which therefore are not the original ones")
    before = _switches(layers)
    try:
        yield layers
    finally:
        _switch(before)


def _switches(layers: list[Any]) -> list[tuple[Any, bool, Any]]:
    return [(layer, layer._disable_adapters, layer._active_adapter) for layer in layers]


def _switch(switches: list[tuple[Any, bool, Any]]) -> None:
    for layer, disabled, active in switches:
        layer._disable_adapters, layer._active_adapter = disabled, active


def recompute_with_same_adapter(policy: nn.Module) -> None:
    """Let activation checkpointing compute a block again under the adapter that was on in its forward.

    Its second forward comes in backward, when a `use_adapter` around the first has ended: it would take the policy's
    adapter, and give wrong gradients without a word. Nothing happens where checkpointing is off.
    """

    @contextmanager
    def again(switches: list[tuple[Any, bool, Any]]) -> Iterator[None]:
        with _restored(policy):
            _switch(switches)
            yield

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        with _restored(policy) as layers:
            return nullcontext(), again(_switches(layers))

    for module in policy.modules():
        if getattr(module, "gradient_checkpointing", False):
            block: Any = module
            block._gradient_checkpointing_func = partial(block._gradient_checkpointing_func, context_fn=contexts)


def _peft(policy: nn.Module) -> PeftModel:
    if not isinstance(policy, PeftModel):
        raise UserError("the policy has no adapter: type model.adapter=lora")
    return policy


# ---- adapters as references -----------------------------------------------------------------------------------------
def reference_problems(lora: Mapping[str, Any]) -> list[str]:
    """Why, with these `peft.LoraConfig` settings, the policy without its adapter is not what training started from."""
    problems = []
    init, bias = str(lora.get("init_lora_weights", True)).lower(), lora.get("bias") or "none"
    if init.startswith(CHANGE_BASE):
        problems.append(f"init_lora_weights={init} moves part of the base weights into the adapter")
    if bias != "none":
        problems.append(f"bias={bias} trains biases of the base, which stay when the adapter is switched off")
    return problems


def check_adapter_off_is_base(policy: nn.Module) -> None:
    """Raise UserError with all reasons where `adapter_off(policy)` is not, or will not stay, the original model."""
    problems = reference_problems(vars(_peft(policy).peft_config[POLICY]))
    stays = sorted(name for name in trainable_state(policy) if not any(part in name for part in ADAPTER_PARTS))
    if stays:
        problems.append(f"{len(stays)} weights of the base are trained as well ({stays[0]}, ...)")
    if problems:
        raise UserError(
            "the policy with its adapter switched off is not the model training started from: "
            f"{'; '.join(problems)}: type ref_strategy=frozen"
        )


def adapter_parameters(policy: nn.Module, name: str = POLICY) -> dict[str, nn.Parameter]:
    """Parameters of one adapter by a name that is the same for every adapter, so that two can be paired."""
    found = {}
    for full, parameter in policy.named_parameters(remove_duplicate=False):
        if is_of_adapter(full, name):
            found[".".join(part for part in full.split(".") if part != name)] = parameter
    return found


def is_of_adapter(parameter: str, name: str) -> bool:
    """Whether a parameter of this full name belongs to the adapter `name`."""
    return name in parameter.split(".") and any(part in parameter for part in ADAPTER_PARTS)


def add_reference_adapter(policy: nn.Module) -> None:
    """Copy the policy's adapter, as it is now, to a second, frozen one called "reference" (see `use_adapter`)."""
    copy_adapter(policy, REFERENCE)


def copy_adapter(policy: nn.Module, name: str) -> None:
    """Copy the policy's adapter, as it is now, to a further, frozen one called `name` (see `use_adapter`).

    The base is shared and untouched, the policy's adapter stays active, whatever is trained stays so (PEFT would freeze
    all adapters but the active one), and no random number of the run is used up. The copy has no dropout.
    """
    model = _peft(policy)
    config: Any = copy.deepcopy(model.peft_config[POLICY])
    if str(config.init_lora_weights).lower().startswith(CHANGE_BASE):
        config.init_lora_weights = True  # theirs would change the base once more; the values are copied below anyway
    with _further_adapter(model, name, config):
        copies = adapter_parameters(model, name)
        with torch.no_grad():
            for key, parameter in adapter_parameters(model, POLICY).items():
                copies[key].copy_(parameter)


@contextmanager
def _further_adapter(model: PeftModel, name: str, config: Any) -> Iterator[None]:
    """One more adapter, frozen and without dropout, to be filled in the context. What was trained before stays so."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(name, config)
    yield
    for parameter in adapter_parameters(model, name).values():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def add_reward_adapter(policy: nn.Module, folder: str) -> nn.Linear:
    """Put the adapter of a reward model onto the policy's base, frozen, as "reward" (see `use_adapter`); its head.

    folder: as `HFModel.save` writes it for a scorer beside the whole model. Raises UserError where it has weights that
    this base has no place for, or no head.
    """
    config, weights = PeftConfig.from_pretrained(folder), load_peft_weights(folder, device="cpu")
    heads = {name: tensor for name, tensor in weights.items() if ".lora_" not in name}
    weight = [tensor for name, tensor in heads.items() if name.endswith(".weight")]
    if len(weight) != 1 or weight[0].dim() != 2:
        raise UserError(f"{folder} is no reward model: its adapter has {len(weight)} heads instead of one")
    settings: Any = config
    settings.modules_to_save, settings.task_type, settings.inference_mode = None, "CAUSAL_LM", False
    with _further_adapter(_peft(policy), REWARD, settings):
        layers = {name: tensor for name, tensor in weights.items() if name not in heads}
        done: Any = set_peft_model_state_dict(_peft(policy), layers, adapter_name=REWARD)
    lost = sorted(done.unexpected_keys) + sorted(k for k in done.missing_keys if f".{REWARD}." in k)
    if lost:
        raise UserError(f"{folder} does not fit the policy's base, see {lost[0]}: take a reward model of that base")
    shape = (weight[0].shape[1], weight[0].shape[0])
    head: Any = nn.utils.skip_init(nn.Linear, *shape, bias=len(heads) > 1)  # draws nothing
    with torch.no_grad():
        head.weight.copy_(weight[0])
        if head.bias is not None:
            head.bias.copy_(next(tensor for name, tensor in heads.items() if name.endswith(".bias")))
    return head.requires_grad_(False)


def trainable_state(policy: nn.Module) -> dict[str, Tensor]:
    """What is trained, by name: live tensors, detached."""
    return {name: p.detach() for name, p in policy.named_parameters(remove_duplicate=False) if p.requires_grad}


# ---- merged and compact weights -------------------------------------------------------------------------------------
@torch.no_grad()
def merged_weights(policy: nn.Module, *, changed_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the equivalent plain model, under the names its own class has; the policy is not touched.

    A layer with an active adapter gives float32 W + scale * B A (LoRA, rsLoRA; DoRA: its rescaled sum), everything else
    its live tensor: parameters and persistent buffers, tied ones under each of their names. `changed_only` leaves out
    what an adapter can never change: enough to refresh a copy made earlier. A policy without adapter gives all it has.
    Weights in 4 bit are given as the numbers they stand for. Tensors are made one at a time, as they are asked for.
    Raises UserError for adapters that cannot be merged.
    """
    plain = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    yield from _merged(plain, "", changed_only and isinstance(policy, PeftModel))


def _merged(module: nn.Module, prefix: str, changed_only: bool) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, LoraLayer):
        yield from _merged_layer(module, prefix)
    elif isinstance(module, ModulesToSaveWrapper):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        inner = module.original_module if module.disable_adapters or not active else module.modules_to_save[active[0]]
        yield from _merged(inner, prefix, False)
    elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise UserError(f"{prefix[:-1]}: a {type(module).__name__} cannot be merged: type model.lora without it")
    else:
        buffers = module.named_buffers(recurse=False)
        saved = ((name, buffer) for name, buffer in buffers if name not in module._non_persistent_buffers_set)
        for name, tensor in (*module.named_parameters(recurse=False), *saved):
            if tensor.requires_grad or not changed_only:
                yield f"{prefix}{name}", _unpacked(tensor)
        for name, child in module.named_children():
            yield from _merged(child, f"{prefix}{name}.", changed_only)


def _merged_layer(layer: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    base = layer.get_base_layer()
    if isinstance(layer, ParamWrapper) or not isinstance(getattr(base, "weight", None), Tensor):
        raise UserError(f"{prefix[:-1]}: a LoRA on a {type(base).__name__} cannot be merged")
    weight, bias = _unpacked(base.weight).float(), getattr(base, "bias", None)
    for name in () if layer.disable_adapters or layer.merged else layer.active_adapters:
        if name not in layer.lora_A and name not in layer.lora_embedding_A:
            continue
        variant = layer.lora_variant.get(name)
        if variant is None:
            weight = weight + layer.get_delta_weight(name).float()
        else:
            weight = variant.merge_safe(layer, name, weight.clone())
        if layer.lora_bias.get(name):
            bias = (0 if bias is None else bias) + layer.lora_B[name].bias * layer.scaling[name]
    yield f"{prefix}weight", weight.detach()
    if bias is not None:
        yield f"{prefix}bias", bias.detach()


def _unpacked(tensor: Tensor) -> Tensor:
    """What a weight in 4 bit stands for, which the adapter was trained on; any other as it is, detached."""
    state = getattr(tensor, "quant_state", None)
    return tensor.detach() if state is None else dequantize_4bit(tensor.data, state)


def compact_frozen_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Store frozen Linear weights in `dtype`, in place; returns how many.

    Autocast to `dtype` rounds them at every product anyway, so under it all numbers stay bit for bit the same, at half
    the memory and without a cast per forward. Left alone is whatever is read in another way: embeddings, norms, the
    head and anything tied to them, adapters, and DoRA's layers, whose norm is taken from the float32 weight. Outside
    autocast such a model cannot run.
    """
    used = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    skipped = _read_otherwise(model)
    count = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear) or id(module) in skipped or used[id(module.weight)] > 1:
            continue
        if module.weight.requires_grad or module.weight.dtype != torch.float32:
            continue  # trained, or quantised
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        count += 1
    return count


def _read_otherwise(model: nn.Module) -> set[int]:
    """Ids of Linear modules whose weight does more than an autocast product."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = {id(m) for m in head.modules()} if isinstance(head, nn.Module) else set()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            adapters = {id(m) for m in layer.modules()} - {id(m) for m in layer.base_layer.modules()}
            found |= adapters | ({id(layer.get_base_layer())} if layer.lora_variant else set())
    return found
