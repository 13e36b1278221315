"""Preference losses of pairs: published values and gradients, invariances, options, weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.dpo import (
    ABSOLUTE_LOSSES,
    DIFFERENCE_LOSSES,
    DIVERGENCES,
    LOSSES,
    SORTED_LOSSES,
    Pairs,
    alpha_divergence,
    irpo_nll,
    pair_loss,
    pair_stats,
    pairs_from_tokens,
    scored,
    sigmoid,
    weighted_losses,
    wpo_weights,
)

# What exo_pair cannot do without; every other loss runs on beta alone.
NEEDS = {"exo_pair": {"label_smoothing": 1e-3}}
NAMES = {
    "chosen": "policy_chosen",
    "rejected": "policy_rejected",
    "ref_chosen": "ref_chosen",
    "ref_rejected": "ref_rejected",
    "num_chosen": "len_chosen",
    "num_rejected": "len_rejected",
}


def pairs_of(v) -> Pairs:
    v.leaf("policy_chosen")
    v.leaf("policy_rejected")
    return Pairs(**{field: v[key] for field, key in NAMES.items()})


def make(chosen: list, rejected: list, num_chosen: list | None = None, num_rejected: list | None = None) -> Pairs:
    """Pairs with a reference of 0, so that the log-ratios are the arguments; lengths 1 unless given."""
    a, b = torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)
    sizes = [
        torch.ones_like(a) if n is None else torch.tensor(n, dtype=torch.float64) for n in (num_chosen, num_rejected)
    ]
    return Pairs(a.requires_grad_(), b.requires_grad_(), torch.zeros_like(a), torch.zeros_like(a), sizes[0], sizes[1])


def random_pairs(num: int = 5) -> Pairs:
    x = [-torch.rand(num, dtype=torch.float64) * 20 for _ in range(4)]
    n = [torch.randint(1, 20, (num,)).double() for _ in range(2)]
    return Pairs(x[0].requires_grad_(), x[1].requires_grad_(), x[2], x[3], n[0], n[1])


def gradients(loss: Tensor, pairs: Pairs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (pairs.chosen, pairs.rejected), retain_graph=True)


def test_dpo_losses(vector: Callable) -> None:
    v = vector("dpo_losses")
    pairs, beta = pairs_of(v), v.params["beta"]
    special = {
        "ipo_sum": ("ipo", {"length_average": False}),
        "cdpo_sigmoid_smoothing_0p1": ("sigmoid", {}),
        "discopop": ("discopop", {"tau": v.params["discopop_tau"]}),
    }
    for key, expected in v.expected.items():
        name, options = special.get(key, (key, {}))
        # 0 is what the file says of losses that have no smoothing: off fits every loss.
        values = pair_loss(name, beta=beta, label_smoothing=expected["label_smoothing"], **options)(pairs)
        v.check(f"{key}/per_pair", values)
        v.check(f"{key}/loss", values.mean())
        for side, slope in zip(("chosen", "rejected"), gradients(values.mean(), pairs), strict=True):
            v.check(f"{key}/grad_{side}", slope)
        v.leave(f"{key}/label_smoothing")
    assert {special.get(key, (key,))[0] for key in v.expected} == set(LOSSES)


def test_dpo_first_step(vector: Callable) -> None:
    """Policy = reference: what masks and reference loading are tested by."""
    v = vector("dpo_first_step")
    pairs, beta = pairs_of(v), v.params["beta"]
    for name in LOSSES:
        if name in v.expected:
            v.check(name, pair_loss(name, beta=beta)(pairs).mean())
    for smoothing in (0.0, 0.1, 0.4):
        v.check("robust_any_eps", pair_loss("robust", beta=beta, label_smoothing=smoothing)(pairs).mean())
    stats = pair_stats(pairs, beta=beta)
    for name in ("accuracies", "margins"):
        v.check(f"rewards_{name}", stats[f"rewards/{name}"].mean())


def test_dpo_metrics(vector: Callable) -> None:
    v = vector("dpo_metrics")
    stats = pair_stats(pairs_of(v), beta=v.params["beta"])
    assert not any(value.requires_grad for value in stats.values())
    for name, value in stats.items():
        v.check(name.replace("/", "_"), value.mean())


def test_ties_are_wrong() -> None:
    """B64: equal ratios on all pairs: accuracy 0."""
    stats = pair_stats(make([0.5, 0.5], [0.5, 0.5]), beta=0.1)
    assert stats["rewards/accuracies"].tolist() == [0, 0]


def test_dpo_f_divergence(vector: Callable) -> None:
    v = vector("dpo_f_divergence")
    pairs, beta = pairs_of(v), v.params["beta"]
    for divergence in DIVERGENCES:
        alpha = v.params["alpha"] if divergence == "alpha_divergence" else None
        scores = scored(pairs, divergence, alpha=alpha)
        v.check(f"{divergence}/chosen_score", scores.chosen_ratio)
        v.check(f"{divergence}/rejected_score", scores.rejected_ratio)
        for name in ("sigmoid", "hinge", "ipo", "sigmoid_norm"):
            values = pair_loss(name, beta=beta, divergence=divergence, alpha=alpha)(pairs)
            v.check(f"{divergence}/{name}", values)
            if name == "sigmoid":
                v.check(f"{divergence}/grad_chosen_sigmoid", gradients(values.mean(), pairs)[0])


def test_dpo_alpha_divergence_parametrisation(vector: Callable) -> None:
    v = vector("dpo_alpha_divergence_parametrisation")
    x, alpha = v["log_ratio"], v.params["alpha"]
    v.check("paper_form", alpha_divergence(x, alpha=alpha))
    v.check("trl_form_at_1_minus_alpha_equals_paper_form", alpha_divergence(x, alpha=alpha))
    v.check("trl_1_16_form", alpha_divergence(x, alpha=1 - alpha))
    torch.testing.assert_close(alpha_divergence(x, alpha=0.0), DIVERGENCES["reverse_kl"](x))
    torch.testing.assert_close(alpha_divergence(x, alpha=1.0), DIVERGENCES["forward_kl"](x))
    torch.testing.assert_close(alpha_divergence(x, alpha=1e-9), x)


def test_dpo_multi_loss_mpo(vector: Callable) -> None:
    v = vector("dpo_multi_loss_mpo")
    pairs, beta, nll = pairs_of(v), v.params["beta"], v["chosen_nll_token_mean"]
    weights = dict(zip(v.params["loss_type"], v.params["loss_weights"], strict=True))
    nll_weight = weights.pop("sft")
    loss = weighted_losses({name: pair_loss(name, beta=beta) for name in weights}, weights)
    v.check("loss", loss(pairs).mean() + nll_weight * nll)
    v.check("sft", -pairs.chosen.sum() / pairs.num_chosen.sum())  # the token mean that is added


def test_rpo_sigmoid_plus_sft(vector: Callable) -> None:
    v = vector("rpo_sigmoid_plus_sft")
    pairs = pairs_of(v)
    preference = pair_loss("sigmoid", beta=v.params["beta"])(pairs)
    token_mean = -pairs.chosen.sum() / pairs.num_chosen.sum()
    v.check("loss_token_mean_sft", preference.mean() + v.params["rpo_alpha"] * token_mean)
    v.check("loss_irpo_alpha_1_per_example_length_normalised_nll", (preference + irpo_nll(pairs)).mean())


def interleaved(v, *keys: str) -> list[Tensor]:
    """The file's rows are chosen, chosen, ..., rejected, ...; here they alternate."""
    return [torch.stack(v[key].chunk(2), 1).flatten(0, 1) for key in keys]


def test_dpo_wpo(vector: Callable) -> None:
    v = vector("dpo_wpo")
    logprobs, ref, mask, sums = interleaved(v, "logps", "ref_logps", "mask", "log_sum_sq_probs")
    values = pair_loss("sigmoid", beta=v.params["beta"])(pairs_from_tokens(logprobs, ref, mask))
    clamped, stats = wpo_weights(logprobs, sums, mask)
    free, _ = wpo_weights(logprobs, sums, mask, clamp=False)
    v.check("pair_weight_clamped_max1_official", clamped)
    v.check("pair_weight_unclamped_trl", free)
    torch.testing.assert_close(stats["wpo_weight"], clamped)
    v.check("loss_clamped", (values * clamped).mean())
    v.check("loss_unclamped", (values * free).mean())
    raw, _ = wpo_weights(logprobs, None, mask, clamp=False)
    for key, pair in (("weights_aligned", free), ("weights_unaligned", raw)):
        each = torch.tensor(v.expected[key], dtype=torch.float64)
        torch.testing.assert_close(pair, each[:2] * each[2:], rtol=1e-7, atol=0)
        v.leave(key)  # per completion: their products were compared
    grad_logprobs = logprobs.clone().requires_grad_()
    assert not wpo_weights(grad_logprobs, sums, mask)[0].requires_grad


def test_dpo_ld(vector: Callable) -> None:
    v = vector("dpo_ld")
    logprobs, ref, mask = interleaved(v, "logps", "ref_logps", "mask")
    for alpha in v.params["ld_alpha"]:
        pairs = pairs_from_tokens(logprobs, ref, mask, ld_alpha=alpha)
        v.check(f"{alpha}/policy", torch.cat([pairs.chosen, pairs.rejected]))
        v.check(f"{alpha}/ref", torch.cat([pairs.ref_chosen, pairs.ref_rejected]))
        v.check(f"{alpha}/loss_sigmoid", pair_loss("sigmoid", beta=v.params["beta"])(pairs).mean())
    with pytest.raises(ValueError, match="ld_alpha"):
        pairs_from_tokens(logprobs, ref, mask, ld_alpha=1.5)


def test_pairs_from_tokens_by_hand() -> None:
    """Rows alternate chosen, rejected; NaN in the padding stays out; with ld_alpha 0 row 1 keeps 1 token of 3."""
    nan = float("nan")
    logprobs = torch.tensor([[-1.0, nan, nan], [-1.0, -2.0, -3.0], [-4.0, -5.0, nan], [-6.0, -7.0, nan]])
    mask = ~logprobs.isnan()
    pairs = pairs_from_tokens(logprobs, torch.zeros_like(logprobs), mask)
    assert [pairs.chosen.tolist(), pairs.rejected.tolist()] == [[-1, -9], [-6, -13]]
    assert [pairs.num_chosen.tolist(), pairs.num_rejected.tolist()] == [[1, 2], [3, 2]]
    short = pairs_from_tokens(logprobs, torch.zeros_like(logprobs), mask, ld_alpha=0.0)
    assert [short.chosen.tolist(), short.rejected.tolist()] == [[-1, -9], [-1, -13]]
    wide = [torch.nn.functional.pad(x, (0, 2)) for x in (logprobs, mask)]
    torch.testing.assert_close(pairs_from_tokens(wide[0], torch.zeros(4, 5), wide[1]).rejected, pairs.rejected)


def test_the_configured_loss_is_the_one_that_runs() -> None:
    """B54: margin 6, one token each, beta 0.1. Chosen +6 over 3 tokens, rejected -2 over 4: 2.5 per token."""
    pairs = make([6.0], [0.0])
    assert pair_loss("sigmoid", beta=0.1)(pairs).item() == pytest.approx(math.log(1 + math.exp(-0.6)))  # 0.437488
    assert pair_loss("hinge", beta=0.1)(pairs).item() == pytest.approx(0.4)
    assert pair_loss("ipo", beta=0.1)(pairs).item() == pytest.approx(1.0)
    long = make([6.0], [-2.0], [3.0], [4.0])
    assert pair_loss("ipo", beta=0.1)(long).item() == pytest.approx(6.25)  # (2 + 0.5 - 5)^2
    assert pair_loss("ipo", beta=0.1, length_average=False)(long).item() == pytest.approx(9.0)  # (8 - 5)^2
    with pytest.raises(ValueError, match="'ip0' does not exist: choose from sigmoid"):
        pair_loss("ip0", beta=0.1)


def test_options_a_loss_cannot_use_are_refused() -> None:
    for name in sorted(set(LOSSES) - {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}):
        with pytest.raises(ValueError, match=f"{name} cannot use label_smoothing=0.1"):
            pair_loss(name, beta=0.1, label_smoothing=0.1)
    for name in ABSOLUTE_LOSSES:
        with pytest.raises(ValueError, match=f"{name} cannot use divergence='forward_kl'"):
            pair_loss(name, beta=0.1, divergence="forward_kl")
    for options, message in (
        ({"tau": 0.1}, "sigmoid cannot use tau"),
        ({"length_average": True}, "sigmoid cannot use length_average"),
        ({"divergence": "js"}, "choose from reverse_kl, forward_kl"),
        ({"divergence": "js_divergence", "alpha": 0.5}, "js_divergence cannot use alpha"),
        ({"alpha": 0.5}, "reverse_kl cannot use alpha"),
    ):
        with pytest.raises(ValueError, match=message):
            pair_loss("sigmoid", beta=0.1, **options)
    with pytest.raises(ValueError, match="beta must be above 0"):
        pair_loss("sigmoid", beta=0.0)
    with pytest.raises(ValueError, match="exo_pair needs label_smoothing"):
        pair_loss("exo_pair", beta=0.1)
    with pytest.raises(ValueError, match="must name the same losses"):
        weighted_losses({"sigmoid": pair_loss("sigmoid", beta=0.1)}, {"hinge": 1.0})


@pytest.mark.parametrize(("name", "smoothing"), [("sigmoid", 0.5), ("robust", 0.5), ("exo_pair", 0.0), ("aot", -0.1)])
def test_smoothing_out_of_range_is_refused(name: str, smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        pair_loss(name, beta=0.1, label_smoothing=smoothing)(make([1.0], [0.0]))


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name: str) -> None:
    pairs = random_pairs()
    loss = pair_loss(name, beta=0.3, **NEEDS.get(name, {}))
    function = lambda a, b: loss(dataclasses.replace(pairs, chosen=a, rejected=b))  # noqa: E731
    assert torch.autograd.gradcheck(function, (pairs.chosen, pairs.rejected))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck_of_divergences(divergence: str) -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DIVERGENCES[divergence], x)


@pytest.mark.parametrize("name", LOSSES)
def test_shifting_policy_and_reference_alike_changes_nothing(name: str) -> None:
    pairs = random_pairs()
    loss = pair_loss(name, beta=0.3, **NEEDS.get(name, {}))
    shift = torch.randn(5, dtype=torch.float64) * 10
    shifted = dataclasses.replace(
        pairs,
        chosen=pairs.chosen + shift,
        ref_chosen=pairs.ref_chosen + shift,
        rejected=pairs.rejected - 2 * shift,
        ref_rejected=pairs.ref_rejected - 2 * shift,
    )
    if name == "aot":  # sorts the policy's and the reference's own margins, so only one common shift cancels
        shifted = dataclasses.replace(pairs, chosen=pairs.chosen + 3.0, ref_chosen=pairs.ref_chosen + 3.0)
    torch.testing.assert_close(loss(shifted), loss(pairs))


@pytest.mark.parametrize("name", LOSSES)
def test_order_and_split_of_pairs(name: str) -> None:
    """B23: pairs do not mix, so microbatches add up; the sorting losses do mix, and say so."""
    pairs = random_pairs()
    loss = pair_loss(name, beta=0.3, **NEEDS.get(name, {}))
    rows = lambda index: Pairs(*(getattr(pairs, f.name)[index] for f in dataclasses.fields(pairs)))  # noqa: E731
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(loss(rows(order)).mean(), loss(pairs).mean())
    alone = torch.cat([loss(rows(slice(i, i + 1))) for i in range(5)])
    assert torch.allclose(alone.mean(), loss(pairs).mean(), rtol=1e-9) == (name not in SORTED_LOSSES)
    if name not in SORTED_LOSSES:
        torch.testing.assert_close(alone, loss(pairs))


@pytest.mark.parametrize(
    ("name", "divergence"),
    [(name, d) for name in LOSSES for d in DIVERGENCES if name in DIFFERENCE_LOSSES or d == "reverse_kl"],
)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_ratios_are_finite(name: str, divergence: str, gap: float) -> None:
    """In float32, value and gradient, with one side or both far off."""
    for a, b in ((gap, 0.0), (0.0, gap), (gap, gap), (gap, -gap)):
        sides = [torch.full((2,), x, requires_grad=True) for x in (a, b)]
        pairs = Pairs(sides[0], sides[1], *torch.zeros(2, 2), *torch.full((2, 2), 3.0))
        values = pair_loss(name, beta=0.1, divergence=divergence, **NEEDS.get(name, {}))(pairs)
        assert torch.isfinite(values).all()
        assert all(torch.isfinite(slope).all() for slope in torch.autograd.grad(values.sum(), sides))


def test_every_loss_pushes_the_pair_apart_from_the_start() -> None:
    """At policy = reference each loss lowers the rejected and raises the chosen, which APO-down leaves alone."""
    pairs = make([0.0], [0.0])
    for name in sorted(set(LOSSES) - {"discopop"}):
        up, down = gradients(pair_loss(name, beta=0.3, **NEEDS.get(name, {}))(pairs).sum(), pairs)
        assert down.item() > 0, name
        assert up.item() < 0 or name == "apo_down", name
        if name == "apo_down":  # beta * (sigma' - sigma') = 0 for the chosen
            assert up.item() == pytest.approx(0)
    # DiscoPOP is not monotone: z = 0, m = 1/2, m' = 1/(4 tau) = 5: (1 - log 2) * 5 - 1/4 - 1/2 > 0.
    up, down = gradients(pair_loss("discopop", beta=1.0)(pairs).sum(), pairs)
    assert up.item() == pytest.approx((1 - math.log(2)) * 5 - 0.75)
    assert down.item() == pytest.approx(-up.item())


def test_cdpo_has_its_minimum_at_the_log_odds_of_the_labels() -> None:
    """(1 - e) of the labels are right: the loss is flat where beta * margin = log((1 - e) / e)."""
    pairs = make([math.log(0.9 / 0.1) / 0.1], [0.0])
    slope, _ = gradients(sigmoid(pairs, beta=0.1, label_smoothing=0.1).sum(), pairs)
    assert slope.item() == pytest.approx(0, abs=1e-12)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    """(1 - e) of its value on the pair + e on the flipped pair is the plain loss."""
    right, flipped = make([0.7], [-0.4]), make([-0.4], [0.7])
    e = 0.2
    loss = pair_loss("robust", beta=1.0, label_smoothing=e)
    mixed = (1 - e) * loss(right) + e * loss(flipped)
    torch.testing.assert_close(mixed, pair_loss("sigmoid", beta=1.0)(right))


def test_an_empty_completion_does_not_divide_by_zero() -> None:
    pairs = make([0.0], [-1.0], [0.0], [2.0])
    for name in ("ipo", "sigmoid_norm"):
        assert torch.isfinite(pair_loss(name, beta=0.1)(pairs)).all()
