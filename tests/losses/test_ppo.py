"""PPO: advantages, clipped losses, what is reported, the KL controller."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.grpo import clipped_policy_loss
from alignment.losses.ppo import explained_variance, gae, next_kl_coefficient, ppo_policy_loss, value_loss
from alignment.losses.reduce import masked_mean, moments, reduce_loss, whiten


def test_gae(vector: Callable) -> None:
    v = vector("gae")
    mask = v["mask"]
    advantages, returns = gae(v["token_rewards"], v["values"], mask, gamma=v.params["gamma"], lam=v.params["lam"])
    v.check("advantages", advantages)
    v.check("returns", returns)
    v.check("whitened_advantages", whiten(advantages, mask))
    v.check("whitened_keep_mean", whiten(advantages, mask, shift_mean=False))
    over = moments(advantages, mask)
    v.check("adv_mean", over.mean)
    v.check("adv_std_ddof1", over.unbiased_var.sqrt())


def test_gae_gamma09_lam08(vector: Callable) -> None:
    v = vector("gae_gamma09_lam08")
    found = gae(v["token_rewards"], v["values"], v["mask"], gamma=v.params["gamma"], lam=v.params["lam"])
    v.check("advantages", found[0])
    v.check("returns", found[1])


def test_gae_interior_mask_holes(vector: Callable) -> None:
    v = vector("gae_interior_mask_holes")
    rewards, values, mask = v["token_rewards"], v["values"], v["mask"]
    advantages, returns = gae(rewards, values, mask, gamma=v.params["gamma"], lam=v.params["lam"])
    v.check("advantages", advantages)
    v.check("returns", returns)
    v.check("advantages_of_compacted_sequence", advantages[mask][None])
    compact = gae(rewards[mask][None], values[mask][None], torch.ones(1, 4).bool(), lam=v.params["lam"])[0]
    v.check("advantages_of_compacted_sequence", compact)


def test_gae_is_the_sum_of_discounted_errors() -> None:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, one float at a time; lam = 1 gives the return minus the value."""
    rewards, values = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    lengths, gamma, lam = (5, 3), 0.9, 0.7
    mask = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    found, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        v = [*values[row, :length].tolist(), 0.0]
        delta = [float(rewards[row, t]) + gamma * v[t + 1] - v[t] for t in range(length)]
        naive = [sum((gamma * lam) ** k * delta[t + k] for k in range(length - t)) for t in range(length)]
        assert found[row].tolist() == pytest.approx([*naive, *[0.0] * (5 - length)])
    returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)[1]
    assert float(returns[1, 0]) == pytest.approx(float(rewards[1, 0] + 0.9 * rewards[1, 1] + 0.81 * rewards[1, 2]))


def test_a_truncated_row_may_go_on_with_a_value() -> None:
    """Reward 1, V = 0, then V(s_T) = 10: delta = 1 + 0.5 * 10; without it the answer is taken as over."""
    args = (torch.tensor([[1.0, 9.0]]), torch.zeros(1, 2), torch.tensor([[True, False]]))
    assert gae(*args, gamma=0.5, bootstrap=torch.tensor([10.0]))[0].tolist() == [[6, 0]]
    assert gae(*args, gamma=0.5)[0].tolist() == [[1, 0]]


def test_advantages_carry_no_gradient_and_padding_changes_nothing() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    rewards, mask = torch.randn(2, 3), torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = gae(rewards, values, mask)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    wide = [torch.nn.functional.pad(x, (0, 2)) for x in (rewards, values, mask)]
    torch.testing.assert_close(gae(*wide)[0][:, :3], advantages)


def test_ppo_policy_loss(vector: Callable) -> None:
    v = vector("ppo_policy_loss")
    logprobs, old, advantages, mask = v.leaf("logps"), v["old_logps"], v["advantages"], v["mask"]
    clip = {"clip_eps": v.params["clip_low"], "clip_eps_high": v.params["clip_high"]}
    values, stats = ppo_policy_loss(logprobs, old, advantages, mask, **clip)
    v.check("per_token_loss", torch.where(mask, values, 0.0))
    loss = reduce_loss(values, mask)
    v.check("loss_token_mean", loss)
    v.check_grad("grad_logps", loss, logprobs)
    v.check("loss_seq_mean_token_mean", reduce_loss(values, mask, "seq_mean_token_mean"))
    v.check("ratio", torch.where(mask, stats["ratio"], 0.0))
    v.check("ratio_mean", masked_mean(stats["ratio"], mask))
    v.check("clipfrac", masked_mean(stats["clip_fraction"], mask))
    for k in ("k1", "k2", "k3"):
        v.check(f"approx_kl_{k}", masked_mean(stats[f"approx_kl_{k}"], mask))
    values, stats = ppo_policy_loss(logprobs, old, advantages, mask, dual_clip=v.params["dual_clip"], **clip)
    v.check("per_token_loss_dual_clip", torch.where(mask, values, 0.0))
    loss = reduce_loss(values, mask)
    v.check("loss_dual_clip_token_mean", loss)
    v.check_grad("grad_logps_dual_clip", loss, logprobs)
    v.check("clipfrac_dual", masked_mean(stats["clip_fraction_dual"], mask))
    assert not any(value.requires_grad for value in stats.values())


def random_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    old = -torch.rand(3, 4, dtype=torch.float64)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 3])[:, None]
    logprobs = (old + 0.3 * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    return logprobs, old, torch.randn(3, 4, dtype=torch.float64), mask


def test_policy_loss_properties() -> None:
    """gradcheck with both clips, the first minibatch, delta's twin, extremes."""
    logprobs, old, advantages, mask = random_case()
    for dual in (None, 1.5):
        assert torch.autograd.gradcheck(
            lambda x, dual=dual: ppo_policy_loss(x, old, advantages, mask, dual_clip=dual)[0], logprobs
        )
    values, stats = ppo_policy_loss(logprobs, logprobs.detach(), advantages, mask)
    torch.testing.assert_close(values, -advantages)
    assert (stats["ratio"] == 1).all()
    for name in ("clip_fraction", "approx_kl_k1", "approx_kl_k2", "approx_kl_k3"):
        assert not stats[name].any()
    dual, _ = ppo_policy_loss(logprobs, old, advantages, mask, dual_clip=3.0)
    torch.testing.assert_close(dual, clipped_policy_loss(logprobs, old, advantages, mask, delta=3.0)[0])
    for gap in (1e4, -1e4):
        far = torch.full((3, 4), gap, requires_grad=True)
        values, stats = ppo_policy_loss(far, torch.zeros(3, 4), advantages.float(), mask, dual_clip=3.0)
        assert torch.isfinite(values).all()
        assert torch.isfinite(torch.autograd.grad(values.sum(), far)[0]).all()
        assert all(torch.isfinite(value).all() for value in stats.values())
    with pytest.raises(ValueError, match="dual_clip"):
        ppo_policy_loss(logprobs, old, advantages, mask, dual_clip=1.0)


def test_ppo_value_loss(vector: Callable) -> None:
    v = vector("ppo_value_loss")
    values, mask = v.leaf("values"), v["mask"]
    found, stats = value_loss(values, v["old_values"], v["returns"], clip_eps=v.params["cliprange_value"])
    loss = reduce_loss(found, mask)
    v.check("loss", loss)
    v.check_grad("grad_values", loss, values)
    v.check("clipfrac", masked_mean(stats["value_clip_fraction"], mask))
    v.check("loss_unclipped", reduce_loss(value_loss(values, v["old_values"], v["returns"], clip_eps=None)[0], mask))


@pytest.mark.parametrize(
    ("new", "old", "wanted", "clipped"),
    [
        (1.0, 5.0, 0.5 * (1 - 10) ** 2, False),  # fell back to 1: the unclipped error, 81, is the larger
        (5.0, 1.0, 0.5 * (1.2 - 10) ** 2, True),  # ran ahead to 5: only 1.2 counts, 8.8^2
    ],
)
def test_value_clipping_takes_the_larger_error(new: float, old: float, wanted: float, clipped: bool) -> None:
    """B60: R = 10, clip 0.2: 40.5 and 38.72; clipped values have no gradient."""
    values = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    found, stats = value_loss(values, torch.tensor(old).double(), torch.tensor(10.0).double())
    assert found.item() == pytest.approx(wanted)
    assert bool(stats["value_clip_fraction"]) == clipped
    assert (torch.autograd.grad(found, values)[0].item() == 0) == clipped


def test_value_loss_gradcheck_and_extremes() -> None:
    values, old, returns = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns)[0], values.requires_grad_())
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    assert torch.isfinite(value_loss(far, -far.detach(), torch.zeros(2))[0]).all()


def test_explained_variance(vector: Callable) -> None:
    v = vector("explained_variance")
    returns, mask = v["returns"], v["mask"]
    v.check("explained_variance", explained_variance(v["values"], returns, mask))
    v.check("constant_returns", explained_variance(v["values"], torch.full_like(returns, 0.1), mask))
    v.leave("verl_variant_eps_1e-5_ddof1")
    assert explained_variance(v["values"], torch.zeros_like(returns), mask).isnan()
    assert explained_variance(returns, returns, mask) == 1


def test_adaptive_kl_controller(vector: Callable) -> None:
    v = vector("adaptive_kl_controller")
    beta, found = v.params["init_kl_coef"], []
    for kl, num in v["current_kl_and_nsteps"].tolist():
        beta = next_kl_coefficient(
            beta,
            kl,
            target_kl_per_sequence=v.params["target"],
            num_sequences=int(num),
            horizon=v.params["horizon"],
        )
        found.append(beta)
    v.check("values", torch.tensor(found, dtype=torch.float64))
    # The error is capped at 0.2 both ways: 256 sequences of 10,000 move beta by at most 0.512 %.
    assert next_kl_coefficient(1.0, 1e9, target_kl_per_sequence=6.0, num_sequences=256) == pytest.approx(1.00512)
    assert next_kl_coefficient(1.0, -1e9, target_kl_per_sequence=6.0, num_sequences=256) == pytest.approx(0.99488)
    with pytest.raises(ValueError, match="target_kl_per_sequence"):
        next_kl_coefficient(1.0, 1.0, target_kl_per_sequence=0.0, num_sequences=1)
    assert math.isfinite(beta)
