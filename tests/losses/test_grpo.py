"""Policy losses of the GRPO family: published values and gradients, a naive loop, what each one's clip does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.grpo import (
    FUNCTIONS,
    POLICY_LOSSES,
    cispo,
    clip_extremes,
    clipped_policy_loss,
    gmpo,
    gspo,
    gspo_token,
    per_token,
    policy_log_ratio,
    sapo,
    vespo,
)
from alignment.losses.kl import corrected_k3, kl_stats, plain_k3
from alignment.losses.options import choose
from alignment.losses.reduce import masked_mean, reduce_loss


def inputs(v) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return v.leaf("logps"), v["old_logps"], v["advantages"], v["mask"]


def loss_of(name: str, args: tuple, max_tokens: int = 8, **options) -> Tensor:
    function, reduction = POLICY_LOSSES[name]
    values, _ = function(*args, **options)
    return reduce_loss(values, args[3], reduction, max_tokens=max_tokens if reduction == "constant" else None)


def test_grpo_losses(vector: Callable) -> None:
    v = vector("grpo_losses")
    args, p = inputs(v), v.params
    logprobs, ref, mask = args[0], v["ref_logps"], args[3]
    clip = {"clip_eps": p["epsilon_low"], "clip_eps_high": p["epsilon_high"]}
    own = {
        "cispo": {"is_weight_max": p["cispo_epsilon_max"]},
        "sapo": {"tau_pos": p["sapo_tau_pos"], "tau_neg": p["sapo_tau_neg"]},
        "vespo": {name.replace("lambda", "lambda"): value for name, value in p["vespo"].items()},
    }

    def check(key: str, loss: Tensor) -> None:
        v.check(f"{key}/loss", loss)
        v.check_grad(f"{key}/grad_logps", loss, logprobs)

    for name in ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo", "cispo", "sapo", "vespo"):
        check(name, loss_of(name, args, p["max_completion_length"], **own.get(name, clip)))
    check("gmpo_eps_0p4", loss_of("gmpo", args, clip_eps=p["gmpo_eps"]))
    check("cispo_two_sided_verl", loss_of("cispo", args, is_weight_min=0.8, is_weight_max=1.28))
    check("gspo_with_dapo_norm", reduce_loss(gspo(*args, **clip)[0], mask, "token_mean"))
    check("grpo_delta_1p5", loss_of("grpo", args, delta=p["delta"], **clip))
    values, stats = clipped_policy_loss(*args, **clip)
    for key, name, term in (
        ("grpo_beta_0p04_plain_k3", "grpo", plain_k3),
        ("grpo_beta_0p04_bias_corrected", "grpo", corrected_k3),
        ("dapo_beta_0p04_bias_corrected", "dapo", corrected_k3),
    ):
        penalised = values + p["beta_kl"] * term(logprobs, ref, args[1])
        check(key, reduce_loss(penalised, mask, POLICY_LOSSES[name].reduction))
    v.check("ratio", torch.where(mask, stats["ratio"], 0.0))
    v.check("seq_ratio_gspo", gspo(*args, **clip)[1]["ratio"][:, 0])
    v.check("kl_k3_token_mean", masked_mean(kl_stats(logprobs, ref, mask)["kl"], mask))
    for part in ("low", "high", "region"):
        v.check(f"clip_ratio_{part}_mean", masked_mean(stats[f"clip_ratio/{part}"], mask))
    extremes = clip_extremes(stats, mask)
    v.check("clip_ratio_low_min", extremes["clip_ratio/low_min"])
    v.check("clip_ratio_high_max", extremes["clip_ratio/high_max"])


def test_grpo_onpolicy_first_step(vector: Callable) -> None:
    """The value says nothing; the gradient is not 0; no ratio is clipped. None for old log-probs is the same."""
    v = vector("grpo_onpolicy_first_step")
    args, mask = inputs(v), v["mask"]
    for old in (args[1], None):
        now = (args[0], old, *args[2:])
        dapo = loss_of("dapo", now)
        v.check("dapo_loss", dapo)
        v.check_grad("grad_dapo", dapo, args[0])
        v.check("grpo_loss", loss_of("grpo", now))
        _, stats = clipped_policy_loss(*now)
        assert (stats["ratio"] == 1).all()
        v.check("clipfrac", masked_mean(stats["clip_ratio/region"], mask))
        v.check("approx_kl", masked_mean(policy_log_ratio(args[0], old), mask))


def test_grpo_fully_masked_row(vector: Callable) -> None:
    v = vector("grpo_fully_masked_row")
    args, p = inputs(v), v.params
    clip = {"clip_eps": p["epsilon_low"], "clip_eps_high": p["epsilon_high"]}
    v.check("dapo_token_mean", loss_of("dapo", args, **clip))
    v.check("grpo_nonempty_rows_verl_openrlhf", loss_of("grpo", args, **clip))
    v.check("dr_grpo", loss_of("dr_grpo", args, p["max_completion_length"], **clip))
    v.leave("grpo_all_rows_trl")
    extremes = clip_extremes(clipped_policy_loss(*args, **clip)[1], args[3])
    assert all(torch.isfinite(value) for value in extremes.values())
    nothing = clip_extremes(clipped_policy_loss(*args)[1], torch.zeros_like(args[3]))
    assert all(value.isnan() for value in nothing.values())


def random_case(num_rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = -torch.rand(num_rows, width, dtype=torch.float64) * 3
    old = logprobs + 0.3 * torch.randn(num_rows, width, dtype=torch.float64)
    lengths = torch.tensor([width, 2, 1, 4])[:num_rows]
    mask = torch.arange(width)[None] < lengths[:, None]
    return logprobs.requires_grad_(), old, torch.randn(num_rows, dtype=torch.float64), mask


def naive(name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> list[float]:
    """Loss of each token by the papers' formulas, one float at a time, at the functions' own defaults."""
    values = []
    for x_row, y_row, a, kept in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist()):
        d = [x - y for x, y, k in zip(x_row, y_row, kept) if k]
        logs = [x for x, k in zip(x_row, kept) if k]
        mean = math.exp(sum(d) / len(d))
        for log, gap in zip(logs, d):
            r = math.exp(gap)
            w = math.exp(sum(d))
            k, rate, tau = (2, 3, 1.0) if a > 0 else (3, 2, 1.05)
            one_sided = [min(g, 0.4) if a > 0 else max(g, -0.4) for g in d]
            values.append(
                {
                    "clipped": -min(r * a, min(max(r, 0.8), 1.2) * a),
                    "gspo": -min(mean * a, min(max(mean, 1 - 3e-4), 1 + 4e-4) * a),
                    "cispo": -min(r, 5) * a * log,
                    "sapo": -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a,
                    "vespo": -(w**k) * math.exp(rate * (1 - w)) * a * log,
                    "gmpo": -a * math.exp(sum(one_sided) / len(d)),
                }[name]
            )
    return values


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("clipped", clipped_policy_loss),
        ("gspo", gspo),
        ("gspo", gspo_token),
        ("cispo", cispo),
        ("sapo", sapo),
        ("vespo", vespo),
        ("gmpo", gmpo),
    ],
)
def test_values_are_the_formulas(name: str, function: Callable) -> None:
    args = random_case()
    values, _ = function(*args)
    torch.testing.assert_close(values[args[3]].tolist(), naive(name, *args), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_are_numerically_right(name: str) -> None:
    """gradcheck, for losses with a stop-gradient against the value with that part fixed."""
    logprobs, old, advantages, mask = random_case()
    if name == "cispo":
        fixed = -(logprobs - old).exp().detach().clamp(max=5) * advantages[:, None]
        values, _ = FUNCTIONS[name](logprobs, old, advantages, mask)
        torch.testing.assert_close(torch.autograd.grad(values.sum(), logprobs)[0], fixed)
    elif name == "vespo":
        values, _ = vespo(logprobs, old, advantages, mask)
        wanted = (values / logprobs).detach()
        torch.testing.assert_close(torch.autograd.grad(values.sum(), logprobs)[0], wanted)
    elif name == "gspo_token":  # with one advantage per row, the gradient of gspo
        weights = torch.where(mask, 1.0, 0.0) / mask.sum(-1, keepdim=True)
        slopes = [
            torch.autograd.grad((f(logprobs, old, advantages, mask)[0] * weights).sum(), logprobs)[0]
            for f in (gspo_token, gspo)
        ]
        torch.testing.assert_close(*slopes)
    else:
        assert torch.autograd.gradcheck(
            lambda x: torch.where(mask, FUNCTIONS[name](x, old, advantages, mask)[0], 0.0), logprobs
        )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_padding_and_row_order(name: str) -> None:
    logprobs, old, advantages, mask = random_case()
    loss = loss_of(name, (logprobs, old, advantages, mask))
    (slope,) = torch.autograd.grad(loss, logprobs)
    pad = [torch.nn.functional.pad(x, (0, 2)) for x in (logprobs, old, mask)]
    wide = loss_of(name, (pad[0], pad[1], advantages, pad[2]))
    torch.testing.assert_close(wide, loss)
    torch.testing.assert_close(torch.autograd.grad(wide, logprobs)[0], slope)
    assert not slope[~mask].any()
    order = torch.tensor([3, 1, 0, 2])
    torch.testing.assert_close(loss_of(name, (logprobs[order], old[order], advantages[order], mask[order])), loss)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_rows_do_not_mix_so_microbatches_add_up(name: str) -> None:
    """B23: each row's values are the same alone."""
    args = random_case()
    whole, _ = FUNCTIONS[name](*args)
    alone = torch.cat([FUNCTIONS[name](*(x[i : i + 1] for x in args))[0] for i in range(4)])
    torch.testing.assert_close(alone, whole)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_are_finite(name: str, gap: float, advantage: float) -> None:
    logprobs = torch.full((2, 3), min(gap, 0.0) - 0.5, requires_grad=True)
    old = torch.full((2, 3), -max(gap, 0.0) - 0.5)
    args = (logprobs, old, torch.full((2,), advantage), torch.ones(2, 3, dtype=torch.bool))
    values, stats = FUNCTIONS[name](*args)
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), logprobs)[0]).all()
    assert all(torch.isfinite(x).all() and not x.requires_grad for x in stats.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss has -A on every token of a row, up to its own averaging within a row."""
    logprobs, _, advantages, mask = random_case()
    values, _ = FUNCTIONS[name](logprobs, None, advantages, mask)
    (slope,) = torch.autograd.grad(torch.where(mask, values, 0.0).sum(), logprobs)
    torch.testing.assert_close(slope, torch.where(mask, -advantages[:, None], 0.0))


def test_token_advantages() -> None:
    """(N, C) advantages are taken as they are; gmpo, whose tokens share one value, refuses them."""
    logprobs, old, advantages, mask = random_case()
    wide = advantages[:, None].expand(4, 6)
    for name in sorted(set(POLICY_LOSSES) - {"gmpo"}):
        one, _ = FUNCTIONS[name](logprobs, old, advantages, mask)
        many, _ = FUNCTIONS[name](logprobs, old, wide, mask)
        torch.testing.assert_close(one, many)
    with pytest.raises(ValueError, match="gmpo takes one advantage per completion"):
        gmpo(logprobs, old, wide, mask)
    assert per_token(advantages).shape == (4, 1)


def test_delta_is_the_dual_clip_for_negative_advantages() -> None:
    """r = e^2 = 7.39, A = -1: loss min(7.39, 3) = 3 without gradient; A = +1: unchanged, clipped at 1.2."""
    logprobs, old = torch.tensor([[0.0]], requires_grad=True), torch.tensor([[-2.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    bad, _ = clipped_policy_loss(logprobs, old, torch.tensor([-1.0]), mask, delta=3.0)
    assert bad.item() == pytest.approx(3.0)
    assert torch.autograd.grad(bad.sum(), logprobs)[0].item() == 0
    good, _ = clipped_policy_loss(logprobs, old, torch.tensor([1.0]), mask, delta=3.0)
    assert good.item() == pytest.approx(-1.2)
    with pytest.raises(ValueError, match=r"delta=1\.1 must be above the upper clip bound 1\.2"):
        clipped_policy_loss(logprobs, old, torch.tensor([1.0]), mask, delta=1.1)


def test_clip_statistics_count_only_what_loses_its_gradient() -> None:
    """Ratios 0.5 and 2 with A = +1 and -1: low only for (0.5, -), high only for (2, +). delta leaves them alone."""
    logprobs = torch.tensor([[0.5, 2.0], [0.5, 2.0]]).log()
    args = (logprobs, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool))
    for options in ({}, {"delta": 1.5}):
        _, stats = clipped_policy_loss(*args, **options)
        assert stats["clip_ratio/low"].tolist() == [[0, 0], [1, 0]]
        assert stats["clip_ratio/high"].tolist() == [[0, 1], [0, 0]]
        assert stats["clip_ratio/region"].tolist() == [[0, 1], [1, 0]]
        torch.testing.assert_close(stats["ratio"], logprobs.exp())
    _, stats = cispo(*args, is_weight_min=0.6, is_weight_max=1.5)
    assert stats["clip_ratio/low"].tolist() == [[1, 0], [1, 0]]
    assert stats["clip_ratio/high"].tolist() == [[0, 1], [0, 1]]


def test_options_a_loss_cannot_use_are_refused() -> None:
    for name, options in (
        ("cispo", {"clip_eps": 0.2}),
        ("grpo", {"tau_pos": 1.0}),
        ("gmpo", {"delta": 3.0}),
        ("sapo", {"is_weight_max": 5.0}),
    ):
        option = next(iter(options))
        with pytest.raises(ValueError, match=f"{name} cannot use {option}="):
            choose(FUNCTIONS, name, **options)
    args = random_case()
    for function, options, message in (
        (clipped_policy_loss, {"clip_eps": 1.5}, "clip_eps"),
        (cispo, {"is_weight_max": 0.5, "is_weight_min": 0.8}, "is_weight_min"),
        (sapo, {"tau_neg": 0.0}, "tau_pos and tau_neg"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*args, **options)
