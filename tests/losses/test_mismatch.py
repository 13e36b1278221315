"""Weights for samples whose log-probs the sampler and the trainer see differently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.grpo import clipped_policy_loss
from alignment.losses.mismatch import (
    CORRECTIONS,
    mismatch_weights,
    on_policy_keep,
    sampler_gap,
    sequence_ratio,
    token_ratio,
)
from alignment.losses.reduce import masked_mean, reduce_loss

NAN = float("nan")


def test_rollout_importance_sampling(vector: Callable) -> None:
    v, losses = vector("rollout_importance_sampling"), vector("grpo_losses", partly=True)
    old, sampler, mask = v["trainer_old_logps"], v["sampler_logps"], v["mask"]
    v.check("token_ratio", token_ratio(old, sampler, mask))
    v.check("seq_ratio", sequence_ratio(old, sampler, mask))
    for mode in CORRECTIONS:
        weights, stats = mismatch_weights(old, sampler, mask, mode=mode, is_weight_max=v.params["clip_max"])
        v.check(mode, weights)
        assert set(stats) == {"sampler_ratio", "sampler_kept", "sampler_gap"}
        key = f"dapo_loss_{mode}"
        if key in v.expected:
            clip = {"clip_eps": 0.2, "clip_eps_high": 0.28}
            values, _ = clipped_policy_loss(losses["logps"], old, losses["advantages"], mask, **clip)
            v.check(key, reduce_loss(values * weights, mask))
        if mode == "sequence_mask":
            assert stats["sampler_kept"][:, 0].tolist() == [1, 0, 1]
        v.check("sampling_logp_difference_mean", masked_mean(stats["sampler_gap"], mask))
        v.check("sampling_logp_difference_max", stats["sampler_gap"][mask].max())


def test_a_missing_sampler_logprob_weighs_one() -> None:
    old, sampler = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[NAN, -2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    assert token_ratio(old, sampler, mask).tolist() == [[1, pytest.approx(math.e), 1]]
    assert sequence_ratio(old, sampler, mask).tolist() == [[pytest.approx(math.e)]]
    assert sampler_gap(old, sampler, mask).tolist() == [[0, 1, 0]]


def test_weights_have_no_gradient_and_are_finite() -> None:
    old = torch.tensor([[1e4, -1e4]], requires_grad=True)
    for mode in CORRECTIONS:
        weights, stats = mismatch_weights(
            old, torch.zeros(1, 2), torch.ones(1, 2).bool(), mode=mode, is_weight_max=3.0, is_weight_min=0.3
        )
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()
        assert all(not s.requires_grad and torch.isfinite(s).all() for s in stats.values())
    # Both bounds: e^20 above 3 and e^-20 below 0.3 are clamped, or dropped.
    settings = {"is_weight_max": 3.0, "is_weight_min": 0.3}
    truncated, _ = mismatch_weights(old, torch.zeros(1, 2), torch.ones(1, 2).bool(), mode="token_truncate", **settings)
    torch.testing.assert_close(truncated, torch.tensor([[3.0, 0.3]]))
    dropped, _ = mismatch_weights(old, torch.zeros(1, 2), torch.ones(1, 2).bool(), mode="token_mask", **settings)
    assert dropped.tolist() == [[0, 0]]


def test_bad_settings_are_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="choose from token_truncate"):
        mismatch_weights(x, x, x.bool(), mode="token", is_weight_max=3.0)
    with pytest.raises(ValueError, match="is_weight_min < is_weight_max"):
        mismatch_weights(x, x, x.bool(), mode="token_mask", is_weight_max=0.5, is_weight_min=1.0)


def test_off_policy_sequence_mask(vector: Callable) -> None:
    v = vector("off_policy_sequence_mask")
    current, sampler, mask = v["logps"], v["sampler_logps"], v["mask"]
    keep = on_policy_keep(current, sampler, v["advantages"], mask, threshold=v.params["threshold"])
    v.check("keep", keep)
    v.check("mean_log_ratio_sampler_minus_new", masked_mean(-sampler_gap(current, sampler, mask), mask, -1))
    # Only bad completions are dropped, and a missing log-prob is no drift.
    assert on_policy_keep(current, sampler, v["advantages"].abs(), mask, threshold=0.0).all()
    assert on_policy_keep(current, sampler * NAN, v["advantages"], mask, threshold=0.0).all()
