"""BCO: the shift between the classes, the weights of prompts, the classifier behind them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch

from alignment.losses.bco import SHIFTS, ClassMoments, bco, fit_prompt_classifier, midpoint, running_mean, udm_weights
from alignment.losses.options import choose


def seen(rewards: torch.Tensor, label: torch.Tensor) -> ClassMoments:
    return ClassMoments.start(rewards).update(rewards, label)


def test_bco(vector: Callable) -> None:
    v = vector("bco")
    logprobs, ref, label, p = v.leaf("logps"), v["ref_logps"], v["label"], v.params
    rewards = p["beta"] * (logprobs - ref).detach()
    v.check("rewards", rewards)
    state = seen(rewards, label)
    for name, key in (("midpoint", "midpoint"), ("running_mean", "running")):
        shift = SHIFTS[name](state)
        v.check(f"delta_{name}", shift)
        values, _ = bco(logprobs, ref, label, shift=shift, beta=p["beta"])
        v.check(f"loss_delta_{key}", values.mean())
    v.check_grad("grad_logps_delta_detached", values.mean(), logprobs)
    prob = torch.full_like(ref, 0.9)
    prob[~label] = v["prob_desirable_of_undesirable_prompts"]
    weights = udm_weights(
        prob, label, min_density_ratio=p["min_density_ratio"], max_density_ratio=p["max_density_ratio"]
    )
    v.check("udm_weights", weights[~label])
    assert (weights[label] == 1).all()
    values, stats = bco(logprobs, ref, label, shift=midpoint(state), beta=p["beta"], weights=weights)
    v.check("loss_udm", values.mean())
    assert stats["udm_weight"].nanmean() == pytest.approx(float(weights[~label].mean()))
    assert not any(value.requires_grad for value in stats.values())


def test_bco_delta_imbalanced(vector: Callable) -> None:
    v = vector("bco_delta_imbalanced")
    state = seen(v["rewards"], v["label"])
    v.check("midpoint", midpoint(state))
    v.check("running_mean", running_mean(state))


def test_the_shift_is_that_of_all_batches() -> None:
    """Rewards 1, 3 | 2 desirable and -1 | -5, 0 undesirable: means 2 and -2, midpoint 0; one class seen: its mean."""
    nothing = ClassMoments.start(torch.zeros(()))
    assert midpoint(nothing) == 0
    first = nothing.update(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    assert midpoint(first) == 2
    second = first.update(torch.tensor([2.0, -1.0]), torch.tensor([True, False]))
    third = second.update(torch.tensor([-5.0, 0.0]), torch.tensor([False, False]))
    assert midpoint(third).item() == pytest.approx(0)
    assert running_mean(third).item() == pytest.approx(0.0)  # (1 + 3 + 2 - 1 - 5 + 0) / 6


def test_the_midpoint_gives_the_tightest_bound() -> None:
    """For one pair, the BCE bound is least at (r_w + r_l) / 2: compare with a grid."""
    chosen, rejected = 0.8, -0.3
    bound = lambda s: math.log(1 + math.exp(-(chosen - s))) + math.log(1 + math.exp(rejected - s))  # noqa: E731
    state = seen(torch.tensor([chosen, rejected]).double(), torch.tensor([True, False]))
    best = float(midpoint(state))
    assert all(bound(best) <= bound(best + step) for step in (-0.1, -0.01, 0.01, 0.1))


def test_properties() -> None:
    logprobs, ref = (torch.randn(4, dtype=torch.float64) for _ in range(2))
    label, shift = torch.tensor([True, False, True, False]), torch.tensor(0.1).double()
    logprobs.requires_grad_()
    loss = lambda x: bco(x, ref, label, shift=shift, beta=0.3)[0]  # noqa: E731
    assert torch.autograd.gradcheck(loss, logprobs)
    torch.testing.assert_close(bco(logprobs + 7, ref + 7, label, shift=shift, beta=0.3)[0], loss(logprobs))
    far = torch.tensor([1e4, 1e4, -1e4, -1e4], requires_grad=True)
    values, _ = bco(far, torch.zeros(4), label, shift=torch.tensor(0.0), beta=0.3)
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), far)[0]).all()
    moving = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(
        bco(logprobs, ref, label, shift=moving, beta=0.3)[0].sum(), moving, allow_unused=True
    ) == (None,)
    with pytest.raises(ValueError, match="'mean' does not exist: choose from midpoint, running_mean"):
        choose(SHIFTS, "mean")


def test_certain_prompts_weigh_within_the_bounds() -> None:
    weights = udm_weights(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([False, False, False]))
    torch.testing.assert_close(weights, torch.tensor([10.0, 0.5, 1.0]))


def test_the_prompt_classifier_is_balanced_logistic_regression() -> None:
    """Against scipy's minimiser of the same objective, with 3 desirable prompts to 1."""
    x = torch.randn(40, 3).double() + torch.tensor([1.0, 0.0, -1.0]) * (torch.arange(40)[:, None] % 4 == 0)
    label = torch.arange(40) % 4 != 0
    weight = np.where(label.numpy(), 40 / (2 * 30), 40 / (2 * 10))
    sign = np.where(label.numpy(), 1.0, -1.0)

    def objective(t: np.ndarray) -> float:
        z = sign * (x.numpy() @ t[:3] + t[3])
        return float((weight * np.logaddexp(0, -z)).sum() + 0.5 * (t[:3] ** 2).sum())

    best = scipy.optimize.minimize(objective, np.zeros(4), method="BFGS", options={"gtol": 1e-9}).x
    fitted = fit_prompt_classifier(x.float(), label)
    torch.testing.assert_close(torch.cat([fitted.weight, fitted.bias[None]]), torch.tensor(best), rtol=1e-4, atol=1e-5)
    prob = fitted(x)
    assert ((prob > 0.5) == label).double().mean() > 0.7
    with torch.no_grad():
        torch.testing.assert_close(fit_prompt_classifier(x, label)(x), prob, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="40 desirable of 40"):
        fit_prompt_classifier(x, torch.ones(40, dtype=torch.bool))
