"""Where scores and penalties go along a completion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.advantages import group_advantages
from alignment.losses.reduce import masked_mean, whiten
from alignment.losses.sampling import penalize_unfinished
from alignment.losses.token_rewards import last_token, place_scores, rewards_to_go, token_rewards

NAN = float("nan")


def test_ppo_token_rewards(vector: Callable) -> None:
    v = vector("ppo_token_rewards")
    finished, penalty = v["has_eos"], v.params["missing_eos_penalty"]
    given = (v["scores"], v["logps"], v["ref_logps"], v["mask"])
    options = {"beta": v.params["kl_coef"], "finished": finished, "missing_eos_penalty": penalty}
    v.check("scores_after_penalty", penalize_unfinished(v["scores"], finished, penalty=penalty))
    v.check("last_token_index", last_token(v["mask"]))
    rewards, stats = token_rewards(*given, **options)
    v.check("token_rewards_k1", rewards)
    v.check("token_rewards_k3", token_rewards(*given, **options, kl="k3")[0])
    v.check("objective_kl_seq_mean", stats["kl_seq"].mean())
    v.check("non_score_reward_seq_mean", stats["non_score_reward"].mean())
    v.check("rlhf_reward_mean", stats["rlhf_reward"].mean())
    assert stats["scores"].tolist() == [0.9, 0.4]


def test_the_score_stands_on_the_last_token() -> None:
    """B57: [t0, t1, eos, pad, pad] -> 2; full length without EOS -> 4; empty -> nothing; a hole is not the end."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0]]).bool()
    placed = place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 4, 0, 0]]


def test_an_empty_response_does_not_touch_its_peers() -> None:
    """B57: whatever its score, an empty row gets no reward on any token, and it shifts nobody's advantage if NaN."""
    mask = torch.tensor([[True, True], [False, False]])
    for score in (-5.0, NAN):
        assert place_scores(torch.tensor([1.0, score]), mask).tolist() == [[0, 1], [0, 0]]
    peers = group_advantages(torch.tensor([1.0, NAN, 0.0]), 3, scale="none")
    assert peers.tolist() == [0.5, 0, -0.5]


def test_a_missing_score_is_an_error_that_names_its_row() -> None:
    with pytest.raises(ValueError, match=r"completions \[1\] have no score"):
        place_scores(torch.tensor([1.0, NAN]), torch.ones(2, 2, dtype=torch.bool))


def test_the_order_of_penalty_clip_and_whitening() -> None:
    """Score 12 - 1 = 11, clipped to 10; no reference: no KL; whitened without moving the mean."""
    logprobs, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    options = {"beta": 0.0, "finished": torch.tensor([False]), "missing_eos_penalty": 1.0, "reward_clip": 10.0}
    rewards, stats = token_rewards(torch.tensor([12.0]), logprobs, None, mask, **options)
    assert rewards.tolist() == [[0, 10]]
    assert stats["rlhf_reward"].tolist() == [10]
    assert stats["kl_seq"].tolist() == [0]
    white, _ = token_rewards(torch.tensor([12.0]), logprobs, None, mask, whiten_rewards=True, **options)
    torch.testing.assert_close(white, whiten(rewards, mask, shift_mean=False))
    torch.testing.assert_close(masked_mean(white, mask), torch.tensor(5.0))


def test_rewards_carry_no_gradient_and_ask_for_what_they_need() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    rewards, stats = token_rewards(torch.ones(1), logprobs, torch.ones(1, 2), mask, beta=0.1)
    assert not rewards.requires_grad
    assert not any(value.requires_grad for value in stats.values())
    with pytest.raises(ValueError, match=r"beta=0\.1 needs the reference"):
        token_rewards(torch.ones(1), logprobs, None, mask, beta=0.1)
    with pytest.raises(ValueError, match="pass finished"):
        token_rewards(torch.ones(1), logprobs, None, mask, beta=0.0, missing_eos_penalty=1.0)
    with pytest.raises(ValueError, match="choose from k1, k2, k3"):
        token_rewards(torch.ones(1), logprobs, torch.ones(1, 2), mask, beta=0.1, kl="k4")


def test_rewards_to_go_by_hand() -> None:
    """gamma 0.5, rewards 1, (hole), 2, 4, pad: 4; 2 + 2 = 4; 1 + 2 = 3. The hole costs no discount."""
    rewards = torch.tensor([[1.0, 100.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[True, False, True, True, False]])
    assert rewards_to_go(rewards, mask, gamma=0.5).tolist() == [[3, 0, 4, 4, 0]]
