"""Best of n, RAFT, RSO, pass@k."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from alignment.losses.reduce import reduce_loss
from alignment.losses.selection import (
    accept,
    acceptance,
    best_of_n_distribution,
    best_of_n_kl_bound,
    pass_at_k,
    pass_at_k_rows,
    ranked_indices,
    selected_mask,
    top_k,
)
from alignment.losses.sft import nll

NAN = float("nan")


def test_best_of_n(vector: Callable) -> None:
    v = vector("best_of_n")
    probs, rewards = v["base_probs"], v["rewards"]
    rows = [best_of_n_distribution(probs, rewards, n) for n in v.params["n"]]
    v.check("distribution", torch.stack(rows))
    v.check("expected_reward", torch.stack([(row * rewards).sum() for row in rows]))
    v.check("exact_kl", torch.stack([(row * (row / probs).log()).sum() for row in rows]))
    v.check("kl_upper_bound", torch.tensor([best_of_n_kl_bound(n) for n in v.params["n"]], dtype=torch.float64))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(best_of_n_distribution(probs[order], rewards[order], 4), rows[2][order])


def test_best_of_n_selection(vector: Callable) -> None:
    v = vector("best_of_n_selection")
    ranked = ranked_indices(v["rewards"])
    v.check("best_index_first_on_tie", ranked[:, 0])
    v.check("worst_index", ranked[:, -1])
    indices, kept = top_k(v["rewards"], v.params["k"])
    v.check("top_k_indices_stable", indices)
    assert kept.all()


def test_raft_drops_what_is_not_good_or_not_scored() -> None:
    rewards = torch.tensor([[0.2, 0.1, 0.3], [NAN, 0.9, NAN], [0.9, 0.1, 0.8]])
    indices, kept = top_k(rewards, 2, threshold=0.5)
    assert indices[2].tolist() == [0, 2]
    assert indices[1, 0] == 1
    assert kept.tolist() == [[False, False], [True, False], [True, True]]
    with pytest.raises(ValueError, match="best 4 of 3"):
        top_k(rewards, 4)


def test_raft_loss(vector: Callable) -> None:
    v = vector("raft_loss")
    mask = selected_mask(v["mask"], v["selected"])
    v.check("loss_token_mean_selected", reduce_loss(nll(v["token_logps"]), mask))


def test_rso_acceptance(vector: Callable) -> None:
    v = vector("rso_acceptance")
    prob = acceptance(v["rewards"], beta=v.params["beta"])
    v.check("accept_prob", prob)
    v.check("target_weights_if_uniform_proposal", prob / prob.sum())


def test_rso_limits() -> None:
    rewards = torch.tensor([[1.0, 0.5, NAN, 1.0], [2.0, 2.0, 2.0, 2.0], [NAN, NAN, NAN, NAN]])
    assert acceptance(rewards, beta=1e-9).tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert acceptance(torch.tensor([1e4, -1e4]), beta=0.5).tolist() == [1, 0]
    drawn = accept(rewards.expand(3, 4), beta=1e-9)
    assert drawn.tolist() == [[True, False, False, True], [True] * 4, [False] * 4]
    # exp(-1) = 0.368 of many draws
    many = accept(torch.tensor([1.0, 0.0]).expand(4000, 2), beta=1.0, generator=torch.Generator().manual_seed(0))
    assert many[:, 0].all()
    assert many[:, 1].double().mean().item() == pytest.approx(0.368, abs=0.03)
    with pytest.raises(ValueError, match="beta"):
        acceptance(rewards, beta=0.0)


def test_pass_at_k(vector: Callable) -> None:
    v = vector("pass_at_k")
    rows = v["n_c_k"].long().tolist()
    v.check("pass_at_k", torch.tensor([pass_at_k(*row) for row in rows], dtype=torch.float64))


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    correct = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(correct, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(5, 2, k) == pytest.approx(share)
        rows = pass_at_k_rows(torch.tensor([correct, [False] * 5]), k)
        assert rows.tolist() == pytest.approx([share, 0.0])
    with pytest.raises(ValueError, match="pass@6"):
        pass_at_k(5, 2, 6)
