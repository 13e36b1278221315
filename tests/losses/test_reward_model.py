"""Bradley-Terry reward models."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.reward_model import (
    bradley_terry,
    calibration_error,
    calibration_gaps,
    margin_accuracy,
    regression,
    reward_model_stats,
    score_range,
)


def test_rm_bradley_terry(vector: Callable) -> None:
    v = vector("rm_bradley_terry")
    chosen, rejected, margin, c = v.leaf("chosen"), v["rejected"], v["margin"], v.params["center_coef"]
    values, stats = bradley_terry(chosen, rejected)
    v.check("loss", values.mean())
    v.check_grad("grad_chosen", values.mean(), chosen)
    v.check("loss_margin", bradley_terry(chosen, rejected, margin=margin)[0].mean())
    v.check("loss_centered", bradley_terry(chosen, rejected, center_coef=c)[0].mean())
    v.check("loss_margin_centered", bradley_terry(chosen, rejected, margin=margin, center_coef=c)[0].mean())
    v.check("loss_soft_label_0p9", bradley_terry(chosen, rejected, prob_chosen=0.9)[0].mean())
    v.check("accuracy_strict", stats["accuracy"].mean())
    v.check("accuracy_half_ties", stats["accuracy_half"].mean())
    v.check("margin_mean", stats["margin"].mean())
    for name, value in score_range(chosen, rejected).items():
        v.check({"std": "std_reward_ddof1"}.get(name, f"{name}_reward"), value)


def test_ties_are_reported() -> None:
    """B64: identical scores for 4 pairs: accuracy 0, half accuracy 0.5, tie rate 1; loss log 2 with no pull apart."""
    chosen, rejected = (torch.zeros(4, requires_grad=True) for _ in range(2))
    values, stats = bradley_terry(chosen, rejected)
    assert {name: stats[name].mean().item() for name in ("accuracy", "accuracy_half", "ties")} == {
        "accuracy": 0,
        "accuracy_half": 0.5,
        "ties": 1,
    }
    torch.testing.assert_close(values, torch.full((4,), math.log(2)))
    assert margin_accuracy(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.0]), torch.tensor([0.5, 0.5])).tolist() == [
        1,
        0,
    ]


def test_soft_labels_of_half_pull_scores_together() -> None:
    chosen, rejected = torch.tensor([1.0], requires_grad=True), torch.tensor([0.0])
    (slope,) = torch.autograd.grad(bradley_terry(chosen, rejected, prob_chosen=torch.tensor([0.5]))[0].sum(), chosen)
    assert slope.item() == pytest.approx(1 / (1 + math.exp(-1)) - 0.5)  # sigmoid(d) - p
    with pytest.raises(ValueError, match="prob_chosen"):
        bradley_terry(chosen, rejected, prob_chosen=1.5)


def test_properties() -> None:
    chosen, rejected = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"margin": torch.rand(4).double(), "prob_chosen": 0.8, "center_coef": 0.01}
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry(a, b, **options)[0], (chosen, rejected))
    values, stats = bradley_terry(chosen, rejected)
    torch.testing.assert_close(bradley_terry(chosen + 3, rejected + 3)[0], values)
    order = torch.tensor([2, 3, 1, 0])
    torch.testing.assert_close(bradley_terry(chosen[order], rejected[order])[0], values[order])
    assert not any(value.requires_grad for value in stats.values())
    torch.testing.assert_close(stats["confidence"], (-values).exp().detach())
    torch.testing.assert_close(reward_model_stats(chosen, rejected)["rewards/chosen"], chosen.detach())
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    value, _ = bradley_terry(far, -far, center_coef=0.01)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), far)[0]).all()


def test_calibration_is_the_distance_of_confidence_and_accuracy() -> None:
    """Gaps of log 3 and -log 3: confidence 3/4, one of two right: |1 + 0 - 2 * 3/4| / 2 = 1/4. A tie: 1/2 - 1/2 = 0."""
    third = math.log(3)
    sums = calibration_gaps(torch.tensor([third, -third, 0.0]))
    assert float(calibration_error(sums, 3)) == pytest.approx(0.5 / 3, abs=1e-7)
    assert sums[5] == pytest.approx(-0.5, abs=1e-7)  # [0.75, 0.80) is the sixth of ten bins from 1/2 to 1
    sure = calibration_gaps(torch.tensor([100.0, -100.0]))  # confidence 1 belongs to the last bin
    torch.testing.assert_close(sure, torch.tensor([0.0] * 9 + [-1.0], dtype=torch.float64))


def test_calibration_adds_up_over_batches() -> None:
    gaps = torch.randn(50)
    parts = calibration_gaps(gaps[:20]) + calibration_gaps(gaps[20:])
    torch.testing.assert_close(parts, calibration_gaps(gaps))


def test_regression_is_the_squared_error() -> None:
    """(1 - 3)^2 = 4 with slope 2 (1 - 3) = -4; (0.5 - 0)^2 = 0.25 with slope 1."""
    scores = torch.tensor([1.0, 0.5], requires_grad=True)
    values, stats = regression(scores, torch.tensor([3.0, 0.0]))
    assert values.tolist() == [4.0, 0.25]
    assert stats["absolute_error"].tolist() == [2.0, 0.5]
    assert torch.autograd.grad(values.sum(), scores)[0].tolist() == [-4.0, 1.0]
