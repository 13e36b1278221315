"""The fused LoRA operation against PEFT's own layer: values, gradients, and when it steps aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd import gradcheck

from alignment.model.fused_lora import FusedLoraLinear, fuse_lora


def adapted(
    *,
    width: int = 6,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    started: bool = True,
    **settings: Any,
) -> nn.Module:
    """Linear width -> width - 1 with a rank-2 adapter of scale 3 (alpha 6)."""
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(width, width - 1, bias=bias)),  # type: ignore[arg-type]
        LoraConfig(r=2, lora_alpha=6, target_modules=["0"], **settings),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name and started:
            nn.init.normal_(parameter)
    return model.to(dtype)


def run(model: nn.Module, x: Tensor, autocast: bool = False) -> list[Tensor]:
    """Output, and the gradients of x and of every trained weight."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad((out.to(x.dtype) * weights).sum(), leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained_base", [False, True])
def test_equals_peft(bias: bool, trained_base: bool) -> None:
    model = adapted(bias=bias)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad or trained_base)
    x = torch.randn(2, 3, 6)
    want = run(model, x)
    assert fuse_lora(model) == 1
    for mine, theirs in zip(run(model, x), want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    model = adapted(dtype=torch.float64)
    fuse_lora(model)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert gradcheck(lambda x, *_: model(x), (x, *trained))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_autocast_is_no_less_exact_than_peft(stored: torch.dtype) -> None:
    """Against float64, the frozen weight stored in either dtype; enough numbers for rounding to average out."""
    model = adapted(width=200)
    base = model.base_model.model[0].base_layer  # type: ignore[union-attr, index]
    base.weight.data = base.weight.data.bfloat16().to(stored)
    x = torch.randn(300, 200)
    peft = run(model, x, autocast=True)
    fuse_lora(model)
    fused = run(model, x, autocast=True)
    exact = run(model.double(), x.double())
    for mine, theirs, true in zip(fused, peft, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - true).norm() <= 1.05 * (theirs - true).norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_fresh_adapter_is_bit_equal_to_none(autocast: bool) -> None:
    """The reference is the policy with its adapter off: B = 0 must change no bit."""
    model = adapted(started=False)
    fuse_lora(model)
    x = torch.randn(4, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        on = model(x)
        with model.disable_adapter():  # type: ignore[operator]
            assert torch.equal(model(x), on)


def changed(kind: str) -> nn.Module:
    """A model whose layer is out of the ordinary."""
    if kind == "dropout":
        return adapted(lora_dropout=0.5).train()
    if kind in ("use_dora", "lora_bias"):
        return adapted(**{kind: True})
    model = adapted()
    if kind == "two adapters":
        config = LoraConfig(r=3, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
        model.add_adapter("other", config)  # type: ignore[operator]
        model.base_model.set_adapter(["default", "other"])  # type: ignore[union-attr, operator]
    if kind == "off":
        model.base_model.disable_adapter_layers()  # type: ignore[union-attr, operator]
    if kind == "merged":
        model.base_model.merge_adapter()  # type: ignore[union-attr, operator]
    if kind == "hook":
        model.base_model.model[0].base_layer.register_forward_hook(lambda _m, _a, out: out + 1)  # type: ignore[union-attr, index]
    return model


@pytest.mark.parametrize("kind", ["dropout", "use_dora", "lora_bias", "two adapters", "off", "merged", "hook"])
def test_steps_aside_for_what_it_does_not_compute(kind: str) -> None:
    x = torch.randn(4, 6)
    model = changed(kind)
    torch.manual_seed(1)
    want = model(x)
    fuse_lora(model)
    torch.manual_seed(1)
    assert torch.equal(model(x), want)
    assert "_LoraLinear" not in type(model(x).grad_fn).__name__


def test_merging_and_going_back_to_peft_still_work() -> None:
    model = adapted()
    x = torch.randn(4, 6)
    fuse_lora(model)
    assert fuse_lora(model) == 1  # a second time finds them as they are
    assert isinstance(model.base_model.model[0], lora.Linear)  # type: ignore[union-attr, index]
    assert type(model.base_model.model[0]) is FusedLoraLinear  # type: ignore[union-attr, index]
    want = model(x)
    merged = model.merge_and_unload()  # type: ignore[operator]
    torch.testing.assert_close(merged(x), want, rtol=1e-5, atol=1e-6)
