"""Which pairs are told to be off-policy, from log-probs that are given."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.batch import Example, collate
from alignment.callbacks.off_policy import OffPolicyWatch


def watched(chosen: float, rejected: float, own: float | None, caplog: pytest.LogCaptureFixture, **module: Any) -> str:
    """What is logged for a step of two pairs in two microbatches whose tokens all have these log-probs."""
    caplog.set_level(logging.INFO, logger="alignment")
    values = {"data_form": "pairs", "step": 0, "needs_reference": True, "device": torch.device("cpu")}
    told = SimpleNamespace(**(values | module))
    strategy = SimpleNamespace(reduce=lambda table, reduce_op: table)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, strategy=strategy)
    watch = OffPolicyWatch()
    if own is not None:
        samples = collate([Example([1], [[5, 6, 7], [5]])])
        samples.texts = ["a", "b"]
        samples.ref_logprobs = torch.full((2, 3), own)
        watch.on_validation_batch_end(trainer, told, None, samples, 0)
    for _ in range(2):
        pairs = collate([Example([1], [[5, 6], [7, 8, 9, 2]])])
        pairs.ref_logprobs = torch.tensor([[chosen] * 4, [rejected] * 4])  # the padding is no part of any mean
        watch.on_train_batch_start(trainer, told, pairs, 0)
        watch.on_train_batch_end(trainer, told, None, pairs, 0)
    assert not caplog.text
    trainer.global_step = 1
    watch.on_train_batch_end(trainer, told, None, collate([Example([1], [[5], [6]])]), 1)
    watch.on_train_batch_end(trainer, told, None, collate([Example([1], [[5], [6]])]), 2)
    assert len(caplog.records) <= 1, "it is told once"
    return f"{caplog.records[0].levelname} {caplog.records[0].getMessage()}" if caplog.records else ""


@pytest.mark.parametrize(
    ("chosen", "rejected", "own", "said"),
    [
        (-2.0, -1.75, -0.5, "WARNING the pairs are off-policy for this reference; log-probs per token under the ref"),
        (-2.0, -0.75, -0.5, "WARNING the reference would say the rejected answers, not the chosen ones; log-probs"),
        (-2.0, -0.75, None, "WARNING the reference would say the rejected"),
        (-0.75, -2.0, -0.5, "INFO log-probs per token under the reference: chosen -0.75, rejected -2.00, its own"),
        (-1.25, -1.25, -0.5, "INFO "),
        (-5.0, -5.0, None, "INFO "),
    ],
)
def test_pairs_far_below_the_models_own_samples_are_told(
    chosen: float, rejected: float, own: float | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched(chosen, rejected, own, caplog).startswith(said)


@pytest.mark.parametrize("module", [{"data_form": "unpaired"}, {"needs_reference": False}])
def test_what_learns_from_no_pairs_or_without_a_reference_is_not_watched(
    module: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert watched(-9.0, -1.0, -0.5, caplog, **module) == ""
