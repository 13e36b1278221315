"""References and averages that follow the policy: TR-DPO's blend and BEMA's bias-corrected average."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_due(step: int, every: int) -> bool:
    """Whether the reference moves after optimizer step `step` (1, 2, ...): at every multiple of `every`."""
    return step >= 1 and step % every == 0


@torch.no_grad()
def blend_(reference: Iterable[Tensor], policy: Iterable[Tensor], *, alpha: float) -> None:
    """In place: reference <- alpha policy + (1 - alpha) reference. TR-DPO (2404.09656) eqs. 1, 2; alpha = 1 copies.

    Parameters (or their shards, if both are sharded alike), paired by position. The paper's soft update is alpha 0.6
    every 512 steps. Raises ValueError for an alpha outside (0, 1], and for shapes that differ.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    for old, new in zip(reference, policy, strict=True):
        if old.shape != new.shape:
            raise ValueError(f"reference and policy parameters differ in shape: {tuple(old.shape)}, {tuple(new.shape)}")
        old.lerp_(new.to(old.dtype), alpha)


def bema_weights(
    step: int, *, lag: float = 10.0, multiplier: float = 1.0, bias_power: float = 0.2, ema_power: float = 0.5
) -> tuple[float, float]:
    """BEMA's (2508.00180) alpha_t = (lag + multiplier t)^-bias_power and beta_t with ema_power."""
    base = lag + multiplier * step
    return base**-bias_power, base**-ema_power


@torch.no_grad()
def bema(ema: Tensor, policy: Tensor, start: Tensor, *, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """One step: EMA <- (1 - beta) EMA + beta policy, and the average alpha (policy - start) + EMA. Returns both.

    start: the policy's parameters when averaging began. The first term takes off the lag of the average.
    """
    moved = torch.lerp(ema, policy, beta)
    return moved, alpha * (policy - start) + moved
