"""TPO on the tiny model, against a loop over tokens; lists of other lengths are refused before weights load."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from alignment.algorithm.tpo import TPO
from alignment.batch import Example
from alignment.errors import UserError

TRIPLES = [[3, 5, 2], [4, 2, 6], [1, 3, 3]]
TPO_OPTIONS = {"beta": 0.1, "loss": "tpo", "gamma_beta_ratio": None, "nll_weight": 0.7}
TPO_L_OPTIONS = {"beta": 2.0, "loss": "tpo_l", "gamma_beta_ratio": 0.25, "nll_weight": 0.7}


@torch.no_grad()
@pytest.mark.parametrize("options", [TPO_OPTIONS, TPO_L_OPTIONS])
def test_a_step_is_the_loop(offline: Callable, batch_of: Callable, sums: Callable, options: dict) -> None:
    module, batch = offline(TPO, **options), batch_of(TRIPLES)
    loss = float(module.training_step(batch, 0))
    gold, chosen, rejected = sums(module.policy, batch).view(3, 3).unbind(1)
    beta, averages = options["beta"], options["loss"] == "tpo_l"
    values = []
    for (_, num_chosen, num_rejected), c, r in zip(TRIPLES, chosen.tolist(), rejected.tolist(), strict=True):
        gap = c / num_chosen - r / num_rejected - 0.25 if averages else c - r
        values.append(math.log(1 + math.exp(-beta * gap)))
    nll = -float(gold.sum()) / 8  # gold answers have 3 + 4 + 1 tokens
    assert loss == pytest.approx(sum(values) / 3 + 0.7 * nll, rel=1e-5)
    metrics = module.meter.flush()
    assert metrics["train/logps/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    by_row = [-float(g) / n for g, (n, _, _) in zip(gold, TRIPLES, strict=True)]
    assert metrics["train/nll_gold"] == pytest.approx(sum(by_row) / 3, rel=1e-5)


def test_microbatches_add_up_to_the_step(offline: Callable, batch_of: Callable) -> None:
    module, whole = offline(TPO, **TPO_OPTIONS), batch_of(TRIPLES)
    expected = module.training_step(whole, 0)
    parts = whole.split(3)
    torch.testing.assert_close(sum(module.training_step(part, 0) for part in parts), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("size", "instead"), [(2, "algorithm=dpo"), (4, "algorithm=pl_dpo"), (6, "algorithm=pl_dpo")])
def test_other_lists_are_refused(offline: Callable, size: int, instead: str) -> None:
    """Six would cut into triples of the wrong answers without a word."""
    module = offline(TPO, **TPO_OPTIONS)
    good, bad = Example([1], [[2]] * 3), Example([1], [[2]] * size, columns={"prompt": "What is one?"})
    for train, heldout in (([bad], []), ([good], [bad])):
        module.trainer = SimpleNamespace(datamodule=SimpleNamespace(train=train, heldout=heldout))
        with pytest.raises(UserError, match=f"lists have {size} .*What is one.*type {instead}"):
            module.setup("fit")
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(train=[good], heldout=[]))
    module.setup("fit")


def test_a_margin_for_the_loss_that_has_none_is_refused(offline: Callable) -> None:
    with pytest.raises(UserError, match="gamma_beta_ratio"):
        offline(TPO, **(TPO_OPTIONS | {"gamma_beta_ratio": 0.5}))
