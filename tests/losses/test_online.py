"""Pairs from scores, XPO, Nash-MD."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.dpo import Pairs, pair_loss
from alignment.losses.online import mixture_logprobs, nash_md, pair_by_preference, pair_by_score, xpo

NAN = float("nan")


def test_online_dpo_pairing(vector: Callable) -> None:
    """The file's rows are all first samples, then all second ones; here a prompt's samples are neighbours."""
    v = vector("online_dpo_pairing")
    first, second = v["scores_sample1"], v["scores_sample2"]
    found = pair_by_score(torch.stack([first, second], 1).flatten())
    num = len(first)
    theirs = lambda row: (row % 2) * num + row // 2  # noqa: E731
    v.check("chosen_indices", theirs(found.chosen))
    v.check("rejected_indices", theirs(found.rejected))
    v.check("sample1_is_chosen", found.chosen % 2 == 0)
    v.check("scores_margin", found.margin)
    v.check("tied_pairs_carry_no_signal_recommended_weight", found.weight)


def test_best_against_worst_of_a_group() -> None:
    scores = torch.tensor([0.1, 0.9, NAN, 0.9, 0.3, 0.3, 0.3, 0.3, NAN, NAN, 1.0, NAN, NAN, NAN, NAN, NAN])
    found = pair_by_score(scores, 4)
    assert found.chosen.tolist() == [1, 4, 10, 12]
    assert found.rejected.tolist() == [0, 7, 10, 12]
    assert found.weight.tolist() == [1, 0, 0, 0]  # ties and lone scores say nothing
    torch.testing.assert_close(found.margin, torch.tensor([0.8, 0.0, NAN, NAN]), equal_nan=True)
    with pytest.raises(ValueError, match="16 rewards are not whole groups of 3"):
        pair_by_score(scores, 3)


def test_a_judge_of_one_half_is_a_tie() -> None:
    found = pair_by_preference(torch.tensor([0.8, 0.5, 0.1]))
    assert found.chosen.tolist() == [0, 2, 5]
    assert found.rejected.tolist() == [1, 3, 4]
    assert found.weight.tolist() == [1, 0, 1]


def test_xpo(vector: Callable) -> None:
    v = vector("xpo")
    wins, policy, ref = v["model_wins"], v.leaf("logp_model_sample"), v["logp_ref_sample"]
    one = torch.ones_like(ref)
    pairs = Pairs(
        torch.where(wins, policy, ref),
        torch.where(wins, ref, policy),
        torch.where(wins, v["ref_logp_model_sample"], v["ref_logp_ref_sample"]),
        torch.where(wins, v["ref_logp_ref_sample"], v["ref_logp_model_sample"]),
        one,
        one,
    )
    values, stats = xpo(pairs, ref, loss=pair_loss("sigmoid", beta=v.params["beta"]), alpha=v.params["alpha"])
    v.check("dpo_losses", stats["dpo_loss"])
    v.check("xpo_losses", stats["xpo_loss"])
    v.check("loss", values.mean())
    assert not any(value.requires_grad for value in stats.values())


def test_xpo_moves_mass_off_the_reference_sample() -> None:
    """The optimism term alone: descending it lowers log p of the reference's sample, at slope alpha."""
    sample = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    values, _ = xpo(Pairs(*[zero] * 6), sample, loss=pair_loss("sigmoid", beta=0.1), alpha=0.25)
    assert torch.autograd.grad(values.sum(), sample)[0].item() == 0.25


def test_nash_md_mixture(vector: Callable) -> None:
    v = vector("nash_md_mixture")
    policy, ref, m = v["policy_logits"], v["ref_logits"], v.params["mixture_coef"]
    v.check("mixture_logprobs", mixture_logprobs(policy, ref, mixture_coef=m))
    from_logprobs = mixture_logprobs(policy.log_softmax(-1), ref.log_softmax(-1), mixture_coef=m)
    v.check("same_from_logprobs", from_logprobs)
    v.check("coef_0_is_policy", mixture_logprobs(policy, ref, mixture_coef=0.0))
    v.check("coef_1_is_ref", mixture_logprobs(policy, ref, mixture_coef=1.0))
    with pytest.raises(ValueError, match="mixture_coef"):
        mixture_logprobs(policy, ref, mixture_coef=1.1)


def test_nash_md_loss(vector: Callable) -> None:
    v = vector("nash_md_loss")
    logprobs, ref, mask, win, beta = (
        v.leaf("logps"),
        v["ref_logps"],
        v["mask"],
        v["win_prob_vs_mixture"],
        v.params["beta"],
    )
    values, stats = nash_md(logprobs, ref, mask, win, beta=beta)
    v.check("loss_sequence_kl", values.mean())
    v.check_grad("grad_logps_sequence", values.mean(), logprobs)
    v.check("kl_seq", stats["kl"])
    torch.testing.assert_close(stats["win_prob"], win)
    v.leave("loss_trl_same_token_kl", "grad_logps_trl")
    # P = 1/2: only the KL acts, and at the reference not even that.
    half, _ = nash_md(logprobs, logprobs.detach(), mask, torch.full((2,), 0.5).double(), beta=beta)
    assert not torch.autograd.grad(half.sum(), logprobs)[0].any()


def test_nash_md_is_a_policy_gradient() -> None:
    """Each token of a row has the row's coefficient beta * KL - (P - 1/2), nothing outside the mask."""
    logprobs = -torch.rand(3, 4, dtype=torch.float64)
    ref, win = -torch.rand(3, 4, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    mask = torch.arange(4)[None] < torch.tensor([4, 1, 0])[:, None]
    values, stats = nash_md(logprobs.requires_grad_(), ref, mask, win, beta=0.3)
    wanted = torch.where(mask, (0.3 * stats["kl"] - (win - 0.5))[:, None], 0.0)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), logprobs)[0], wanted)
    far = torch.full((1, 2), -1e4, requires_grad=True)
    values, _ = nash_md(far, torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.ones(1), beta=0.1)
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), far)[0]).all()
