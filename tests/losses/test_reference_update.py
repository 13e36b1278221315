"""References that follow the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.reference_update import bema, bema_weights, blend_, is_due


def test_tr_dpo_soft_update(vector: Callable) -> None:
    v = vector("tr_dpo_soft_update")
    reference, policy = v["ref"].clone(), v["policy"]
    blend_([reference], [policy], alpha=v.params["alpha"])
    v.check("ref_after_soft", reference)
    blend_([reference], [policy], alpha=1.0)
    v.check("ref_after_hard_alpha_1", reference)
    due = [step for step in range(1601) if is_due(step, v.params["tau"])]
    v.check("sync_at_global_steps_upto_1600", torch.tensor(due))


def test_bema_schedule(vector: Callable) -> None:
    v = vector("bema_schedule")
    p = v.params
    options = {
        "lag": p["lag"],
        "multiplier": p["multiplier"],
        "bias_power": p["bias_power"],
        "ema_power": p["ema_power"],
    }
    found = [bema_weights(int(t), **options) for t in v["t"]]
    v.check("alpha_t", torch.tensor([alpha for alpha, _ in found], dtype=torch.float64))
    v.check("beta_t", torch.tensor([beta for _, beta in found], dtype=torch.float64))
    assert bema_weights(7) == bema_weights(7, **options)


def test_blending_keeps_the_references_dtype_and_takes_no_gradient() -> None:
    reference, policy = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)
    blend_([reference], [policy], alpha=0.5)
    assert reference.dtype == torch.bfloat16
    assert reference.tolist() == [0.5, 0.5]
    assert not reference.requires_grad
    with pytest.raises(ValueError, match="alpha"):
        blend_([reference], [policy], alpha=0.0)
    with pytest.raises(ValueError, match="differ in shape"):
        blend_([reference], [torch.ones(1)], alpha=0.5)


def test_bema_by_hand() -> None:
    """start 1, EMA 2, policy 4: EMA <- 0.5 * 2 + 0.5 * 4 = 3; average 0.1 * (4 - 1) + 3 = 3.3."""
    moved, average = bema(torch.tensor(2.0), torch.tensor(4.0), torch.tensor(1.0), alpha=0.1, beta=0.5)
    assert moved.item() == 3
    assert average.item() == pytest.approx(3.3)
