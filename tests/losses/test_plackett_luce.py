"""Ranked lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from alignment.losses.plackett_luce import all_pairs, plackett_luce, ranked, ranked_dpo, ranking_stats
from alignment.losses.reward_model import bradley_terry


def test_rm_plackett_luce(vector: Callable) -> None:
    v = vector("rm_plackett_luce")
    scores, mask = v["scores_best_first"], v["mask"]
    nll = plackett_luce(scores, mask)
    v.check("nll_per_list", nll)
    v.check("loss_mean_over_lists_with_K_ge_2", nll[ranked(mask)].mean())
    v.check("all_pairs_bt_per_list", all_pairs(scores, mask))
    stats = ranking_stats(scores, mask)
    v.check("top1_accuracy", stats["top1_accuracy"])
    v.check("pair_accuracy", stats["pair_accuracy"])


def test_rm_plackett_luce_k2_equals_bt(vector: Callable) -> None:
    v = vector("rm_plackett_luce_K2_equals_bt")
    scores, mask = v["scores_best_first"], v["mask"]
    v.check("nll", plackett_luce(scores, mask)[0])
    v.check("bt", all_pairs(scores, mask)[0])
    v.check("bt", bradley_terry(scores[:, 0], scores[:, 1])[0][0])


def test_dpo_plackett_luce(vector: Callable) -> None:
    v = vector("dpo_plackett_luce")
    policy, ref, beta = v["policy_best_first"][None], v["ref_best_first"][None], v.params["beta"]
    v.check("rewards", (beta * (policy - ref))[0])
    v.check("loss", ranked_dpo(policy, ref, torch.ones_like(policy, dtype=torch.bool), beta=beta)[0])


def test_the_probabilities_of_all_orders_sum_to_one() -> None:
    scores = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=torch.float64)
    orders = torch.stack([scores[list(order)] for order in itertools.permutations(range(4))])
    nll = plackett_luce(orders, torch.ones_like(orders, dtype=torch.bool))
    assert (-nll).exp().sum().item() == pytest.approx(1.0)


def test_properties() -> None:
    """gradcheck with padding, shift of a list's scores, padded columns, row order, extremes."""
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 1])[:, None]
    for loss in (plackett_luce, all_pairs):
        assert torch.autograd.gradcheck(lambda s, loss=loss: loss(s, mask), scores)
        values = loss(scores, mask)
        torch.testing.assert_close(loss(scores + torch.tensor([[3.0], [-9.0], [5.0]]), mask), values)
        wide = [torch.nn.functional.pad(x, (0, 2)) for x in (scores, mask)]
        torch.testing.assert_close(loss(*wide), values)
        torch.testing.assert_close(loss(scores[[2, 0, 1]], mask[[2, 0, 1]]), values[[2, 0, 1]])
        far = torch.tensor([[1e4, -1e4, 0.0, 1e4]], requires_grad=True)
        value = loss(far, torch.ones(1, 4, dtype=torch.bool))
        assert torch.isfinite(value).all()
        assert torch.isfinite(torch.autograd.grad(value.sum(), far)[0]).all()


def test_equal_scores_are_wrong() -> None:
    """B64: a constant model ranks nothing."""
    stats = ranking_stats(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert [value.item() for value in stats.values()] == [0, 0]
