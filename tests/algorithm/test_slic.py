"""SLiC's step on the tiny model, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.algorithm.slic import SLiC
from alignment.errors import UserError

LENGTHS = [[3, 5], [4, 2], [2, 2]]


@torch.no_grad()
@pytest.mark.parametrize("nll_weight", [0.0, 0.5])
def test_a_step_is_the_loop(offline: Callable, batch_of: Callable, sums: Callable, nll_weight: float) -> None:
    module, batch = offline(SLiC, margin=2.0, nll_weight=nll_weight), batch_of(LENGTHS)
    loss = float(module.training_step(batch, 0))
    chosen, rejected = sums(module.policy, batch).view(3, 2).unbind(1)
    hinges = [max(0.0, 2.0 - float(c) + float(r)) for c, r in zip(chosen, rejected, strict=True)]
    assert any(hinges)
    # chosen answers have 3 + 4 + 2 tokens
    assert loss == pytest.approx(sum(hinges) / 3 - nll_weight * float(chosen.sum()) / 9, rel=1e-5)
    metrics = module.meter.flush()
    assert metrics["train/logps/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert metrics["train/rewards/margins"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
    assert ("train/nll_chosen" in metrics) == (nll_weight > 0)


def test_a_margin_of_nothing_is_refused(offline: Callable) -> None:
    with pytest.raises(UserError, match=r"algorithm\.margin=1"):
        offline(SLiC, margin=0.0, nll_weight=1.0)
