"""LoRA layers as one operation: y = x W' + s (x A') B', with its own backward.

PEFT computes the three products apart, scales and adds the result, and under autocast casts x twice: on a small model
these passes over memory cost more than the adapter's arithmetic. Fused, x is cast once, and the adapter's part is added
inside its matrix product, in forward to y and in backward to the gradient of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fuse_lora(model: nn.Module) -> int:
    """Let every plain LoRA layer on an `nn.Linear` compute itself in one operation; returns how many there are.

    Names, weights, `isinstance` and what PEFT does with the layers stay as they are, and a layer whose state is out of
    the ordinary (switched off, merged, several adapters, dropout, DoRA, sharded weights) computes itself PEFT's way.
    """
    layers = [module for module in model.modules() if type(module) is lora.Linear]
    for layer in layers:
        layer.__class__ = FusedLoraLinear
    return sum(type(module) is FusedLoraLinear for module in model.modules())


class _Parts(NamedTuple):
    base: nn.Linear
    down: Tensor
    up: Tensor
    scale: float
    dtype: torch.dtype


class FusedLoraLinear(lora.Linear):
    """PEFT's LoRA layer with another forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = None if args or kwargs else self._parts(x)
        if parts is None:
            return super().forward(x, *args, **kwargs)
        base, down, up, scale, dtype = parts
        return _LoraLinear.apply(x, base.weight, base.bias, down, up, scale, dtype)

    def _parts(self, x: Tensor) -> _Parts | None:
        """What the fused operation takes, or None where PEFT's forward does something else than that."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or len(active) != 1 or active[0] in self.lora_variant:
            return None
        base, down, up = self.base_layer, self.lora_A[active[0]], self.lora_B[active[0]]
        if self.training and getattr(self.lora_dropout[active[0]], "p", 0.0) > 0:
            return None
        if not (_is_plain(base) and _is_plain(down) and _is_plain(up)) or down.bias is not None or up.bias is not None:
            return None
        dtype = base.weight.dtype
        if dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        elif not (x.dtype == dtype == down.weight.dtype == up.weight.dtype):
            return None
        return _Parts(base, down.weight, up.weight, self.scaling[active[0]], dtype)


def _is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """An nn.Linear whose forward is its weight and nothing else: no subclass's, no hook, no shard of a tensor."""
    return (
        type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)
        and type(linear.weight.data) is Tensor
        and linear.weight.dim() == 2
    )


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            out = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
            low = rows @ down.to(dtype).T
            out.addmm_(low, up.to(dtype).T, alpha=scale)
        ctx.save_for_backward(rows, low, weight, down, up)
        ctx.scale, ctx.shape, ctx.x_dtype = scale, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, down, up = ctx.saved_tensors
        need_x, need_weight, need_bias, need_down, need_up, *_ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        low_grad = (grad @ up.to(grad.dtype)).mul_(ctx.scale)
        x_grad = None
        if need_x:
            x_grad = (grad @ weight.to(grad.dtype)).addmm_(low_grad, down.to(grad.dtype))
            x_grad = x_grad.view(ctx.shape).to(ctx.x_dtype)
        return (
            x_grad,
            (grad.T @ rows).to(weight.dtype) if need_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if need_bias else None,
            (low_grad.T @ rows).to(down.dtype) if need_down else None,
            (grad.T @ low).mul_(ctx.scale).to(up.dtype) if need_up else None,
            None,
            None,
        )
