"""What pair algorithms log, against a naive loop over tokens, and the warning of likelihood displacement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.algorithm.cpo import CPO
from alignment.algorithm.displacement import DisplacementWatch
from alignment.algorithm.dpo import DPO
from alignment.algorithm.orpo import ORPO
from alignment.algorithm.simpo import SimPO
from alignment.losses.dpo import SORTED_LOSSES

RTOL = 1e-5
DPO_OPTIONS: dict[str, Any] = {
    "beta": 0.1,
    "loss": "sigmoid",
    "loss_weights": None,
    "label_smoothing": 0.0,
    "length_average": None,
    "tau": None,
    "divergence": "reverse_kl",
    "divergence_alpha": None,
    "ld_alpha": 1.0,
    "wpo": False,
    "nll_weight": 0.0,
}
SIMPO_OPTIONS = {"beta": 2.5, "gamma_beta_ratio": 0.5, "alpha": 0.0, "label_smoothing": 0.0, "nll_weight": 0.0}
LENGTHS = [[3, 5], [4, 2], [1, 6]]


def step(module: Any, batch: Any) -> dict[str, float]:
    if module.needs_reference:
        batch.ref_logprobs = module.reference_logprobs(batch)
    module.training_step(batch, 0)
    return module.meter.flush()


@torch.no_grad()
@pytest.mark.parametrize("phase", ["train", "val"])
def test_the_metrics_of_dpo_are_those_of_the_loop(offline: Callable, batch_of: Callable, sums: Callable, phase) -> None:
    module, batch = offline(DPO, **DPO_OPTIONS), batch_of(LENGTHS)
    module.trainer.training = phase == "train"
    metrics = step(module, batch)
    policy, reference = (sums(model, batch).view(3, 2) for model in (module.policy, module.reference.model))
    a, b = (policy - reference).unbind(1)
    expected = {
        "rewards/chosen": 0.1 * a.mean(),
        "rewards/rejected": 0.1 * b.mean(),
        "rewards/margins": 0.1 * (a - b).mean(),
        "rewards/accuracies": (a > b).float().mean(),
        "logps/chosen": policy[:, 0].mean(),
        "logps/rejected": policy[:, 1].mean(),
    }
    for name, value in expected.items():
        assert metrics[f"{phase}/{name}"] == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


@torch.no_grad()
def test_rewards_of_losses_of_averages_are_averages(offline: Callable, batch_of: Callable, sums: Callable) -> None:
    """SimPO's reward is beta * log-prob / length, ORPO's the same with its lambda; CPO's is of the sum."""
    batch = batch_of(LENGTHS)
    lengths = torch.tensor(LENGTHS, dtype=torch.float32)
    for algorithm, options, beta, per_token in (
        (SimPO, SIMPO_OPTIONS, 2.5, True),
        (ORPO, {"beta": 0.1, "nll_weight": 1.0}, 0.1, True),
        (CPO, {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "nll_weight": 1.0}, 0.1, False),
    ):
        module = offline(algorithm, **options)
        metrics, totals = step(module, batch), sums(module.policy, batch).view(3, 2)
        rewards = beta * (totals / lengths if per_token else totals).mean(0)
        assert metrics["train/rewards/chosen"] == pytest.approx(float(rewards[0]), rel=RTOL)
        assert metrics["train/rewards/rejected"] == pytest.approx(float(rewards[1]), rel=RTOL)


@torch.no_grad()
def test_the_entropy_is_of_the_held_out_completions(offline: Callable, batch_of: Callable) -> None:
    module, batch = offline(DPO, **DPO_OPTIONS), batch_of(LENGTHS)
    assert "train/entropy" not in step(module, batch)
    module.trainer.training = False
    entropies = []
    for n, ids in enumerate(batch.completion_ids):
        prompt = batch.prompt_ids[n // 2][batch.prompt_mask[n // 2]].tolist()
        completion = ids[batch.completion_mask[n]].tolist()
        probs = module.policy(torch.tensor([prompt + completion])).logits[0].softmax(-1)
        entropies += [-(p * p.log()).sum() for p in probs[len(prompt) - 1 : -1]]
    assert step(module, batch)["val/entropy"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-4)


def rows(module: Any, count: int, *, fall: float) -> None:
    """Log `count` rows in which the chosen log-ratios fall by `fall` a row and margins rise."""
    for i in range(count):
        reward = -module.beta * fall * i
        row = {"train/rewards/chosen": reward, "train/logps/chosen": -50.0 - fall * i, "train/rewards/margins": 0.1 * i}
        module._log(row)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "alignment"]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.LightningModule.log_dict", lambda *args, **kwargs: None)


@pytest.mark.parametrize(
    ("algorithm", "options", "level", "remedy"),
    [
        (DPO, DPO_OPTIONS, "log-ratio of the chosen answers to the reference fell from -1.75 to", "nll_weight=1"),
        (DPO, DPO_OPTIONS | {"nll_weight": 0.005}, "from -1.75 to -5.75", "algorithm.nll_weight=0.05"),
        (SimPO, SIMPO_OPTIONS, "log-prob of the chosen answers fell from -51.75 to -55.75", "nll_weight=1"),
    ],
)
def test_displacement_is_told_once_with_a_remedy(
    offline: Callable, quiet: None, caplog, algorithm, options, level, remedy
) -> None:
    module = offline(algorithm, **options)
    with caplog.at_level(logging.WARNING, "alignment"):
        rows(module, 40, fall=0.5)
    (message,) = told(caplog)
    assert level in message
    assert remedy in message
    assert "algorithm.lr=0.000333333 (a third)" in message


def test_a_healthy_run_hears_nothing(offline: Callable, quiet: None, caplog) -> None:
    with caplog.at_level(logging.WARNING, "alignment"):
        rows(offline(DPO, **DPO_OPTIONS), 40, fall=-0.5)
        rows(offline(DPO, **DPO_OPTIONS), 40, fall=0.01)
    assert not told(caplog)


def test_a_moving_reference_does_not_hide_the_fall(offline: Callable, quiet: None, caplog) -> None:
    """A reference that follows takes the log-ratio back to 0: the level itself is watched then."""
    module = offline(DPO, **DPO_OPTIONS)
    module.reference.moves = True
    with caplog.at_level(logging.WARNING, "alignment"):
        for i in range(40):
            module._log({"train/rewards/chosen": 0.0, "train/logps/chosen": -9.0 - i, "train/rewards/margins": 0.1 * i})
    assert len(told(caplog)) == 1


def test_the_watch_is_in_the_checkpoint(offline: Callable, quiet: None) -> None:
    one, other, checkpoint = offline(DPO, **DPO_OPTIONS), offline(DPO, **DPO_OPTIONS), {}
    rows(one, 12, fall=0.5)
    one.on_save_checkpoint(checkpoint)
    other.on_load_checkpoint(checkpoint)
    fresh = DisplacementWatch()
    fresh.load_state_dict(other.displacement.state_dict())
    assert fresh.state_dict() == one.displacement.state_dict()
    assert len(fresh.recent) == 12


def test_other_ranks_keep_silent(offline: Callable, quiet: None, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    module = offline(DPO, **DPO_OPTIONS)
    module.trainer = SimpleNamespace(is_global_zero=False, loggers=[], global_step=0)
    monkeypatch.setattr(type(module), "step", 3)
    with caplog.at_level(logging.WARNING, "alignment"):
        rows(module, 40, fall=0.5)
    assert not told(caplog)
    assert module.displacement.warned


def test_the_declared_sorted_losses_are_those_there_are() -> None:
    assert set(DPO.sorted_losses) == SORTED_LOSSES
