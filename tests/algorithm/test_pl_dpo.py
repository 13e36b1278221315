"""Plackett-Luce DPO on the tiny model: the naive product of choices, DPO for lists of two, and what it logs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from alignment.algorithm.dpo import DPO
from alignment.algorithm.pl_dpo import PLDPO

LISTS = [[3, 5, 2, 4], [1, 2, 6, 3], [2, 2, 2, 2]]
DPO_OPTIONS = {"loss": "sigmoid", "loss_weights": None, "label_smoothing": 0.0, "length_average": None, "tau": None}
DPO_OPTIONS |= {"divergence": "reverse_kl", "divergence_alpha": None, "ld_alpha": 1.0, "wpo": False, "nll_weight": 0.0}


@torch.no_grad()
def test_a_step_is_the_loop(offline: Callable, batch_of: Callable, sums: Callable) -> None:
    """The best of all is chosen first, then the best of the rest, each with probability exp(score) / sum exp."""
    module, batch = offline(PLDPO, beta=0.3), batch_of(LISTS)
    batch.ref_logprobs = module.reference_logprobs(batch)
    loss = float(module.training_step(batch, 0))
    ratios = sums(module.policy, batch) - sums(module.reference.model, batch)
    scores = (0.3 * ratios).view(3, 4).tolist()
    values, right, top = [], 0, 0
    for row in scores:
        terms = [row[k] - math.log(sum(math.exp(s) for s in row[k:])) for k in range(3)]
        values.append(-sum(terms))
        right += sum(a > b for a, b in itertools.combinations(row, 2))
        top += row[0] > max(row[1:])
    assert loss == pytest.approx(sum(values) / 3, rel=1e-5)
    metrics = module.meter.flush()
    assert metrics["train/pair_accuracy"] == pytest.approx(right / 18)
    assert metrics["train/top1_accuracy"] == pytest.approx(top / 3)
    assert metrics["train/rewards/chosen"] == pytest.approx(sum(row[0] for row in scores) / 3, rel=1e-3, abs=1e-5)
    assert metrics["train/rewards/rejected"] == pytest.approx(sum(row[3] for row in scores) / 3, rel=1e-3, abs=1e-5)


def test_lists_of_two_are_dpo(offline: Callable, batch_of: Callable) -> None:
    """Loss and gradient, and the metrics that both have."""
    found = []
    for algorithm, options in ((PLDPO, {}), (DPO, DPO_OPTIONS)):
        torch.manual_seed(5)
        module, batch = offline(algorithm, beta=0.1, **options), batch_of([[3, 5], [4, 2], [1, 6]])
        module.policy.zero_grad()
        batch.ref_logprobs = module.reference_logprobs(batch)
        loss = module.training_step(batch, 0)
        loss.backward()
        grads = [p.grad.clone() for p in module.policy.parameters() if p.grad is not None]
        found.append((loss.detach(), grads, module.meter.flush()))
    (one, one_grads, one_metrics), (other, other_grads, other_metrics) = found
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(one_grads, other_grads, rtol=1e-5, atol=1e-7)
    shared = one_metrics.keys() & other_metrics.keys()
    assert {"train/rewards/margins", "train/rewards/accuracies", "train/logps/chosen"} <= shared
    assert {name: one_metrics[name] for name in shared} == pytest.approx({n: other_metrics[n] for n in shared})


@torch.no_grad()
def test_at_the_reference_every_order_is_as_likely(offline: Callable, batch_of: Callable) -> None:
    """log 4! = log 24 for lists of four."""
    module, batch = offline(PLDPO, beta=0.1), batch_of(LISTS)
    batch.ref_logprobs = module.logprobs(batch).logprobs
    assert float(module.training_step(batch, 0)) == pytest.approx(math.log(24), rel=1e-6)


def test_microbatches_add_up_to_the_step(offline: Callable, batch_of: Callable) -> None:
    module, whole = offline(PLDPO, beta=0.3), batch_of(LISTS)
    whole.ref_logprobs = module.reference_logprobs(whole)
    expected = module.training_step(whole, 0)
    parts = sum(module.training_step(part, 0) for part in whole.split(4))
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-7)
