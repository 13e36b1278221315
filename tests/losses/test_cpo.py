"""CPO and its variants: reference-free pairs, with the likelihood of the chosen beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.cpo import CPO_LOSSES
from alignment.losses.dpo import Pairs
from alignment.losses.options import choose


def without_reference(chosen: Tensor, rejected: Tensor, num_chosen: Tensor, num_rejected: Tensor) -> Pairs:
    zero = torch.zeros_like(chosen)
    return Pairs(chosen, rejected, zero, zero, num_chosen, num_rejected)


def test_cpo(vector: Callable) -> None:
    v, sizes = vector("cpo"), vector("dpo_losses", partly=True)
    pairs = without_reference(v["logp_chosen"], v["logp_rejected"], sizes["len_chosen"], sizes["len_rejected"])
    beta, nll = v.params["beta"], v["chosen_nll_token_mean"]
    values = choose(CPO_LOSSES, "sigmoid", beta=beta)(pairs)
    v.check("per_pair", values)
    v.check("preference_loss", values.mean())
    v.check("nll_loss", -pairs.chosen.sum() / pairs.num_chosen.sum())
    v.check("loss", values.mean() + v.params["cpo_alpha"] * nll)
    v.check("hinge", choose(CPO_LOSSES, "hinge", beta=beta)(pairs).mean())
    v.check("ipo_avg", choose(CPO_LOSSES, "ipo", beta=beta)(pairs).mean())


def test_cpo_simpo(vector: Callable) -> None:
    v = vector("cpo_simpo")
    beta, gamma = v.params["beta"], v.params["gamma"]
    one = torch.ones_like(v["avg_logp_chosen"])
    pairs = without_reference(v["avg_logp_chosen"], v["avg_logp_rejected"], one, one)
    values = choose(CPO_LOSSES, "simpo", beta=beta, gamma_beta_ratio=gamma / beta)(pairs)
    v.check("loss", values.mean() + v.params["cpo_alpha"] * v["chosen_nll_token_mean"])


def test_options_of_one_variant_are_refused_by_another() -> None:
    """B56: a margin is SimPO's, CPO has none."""
    with pytest.raises(ValueError, match=r"sigmoid cannot use gamma_beta_ratio=0\.5"):
        choose(CPO_LOSSES, "sigmoid", beta=0.1, gamma_beta_ratio=0.5)
    with pytest.raises(ValueError, match="alphapo needs alpha"):
        choose(CPO_LOSSES, "alphapo", beta=0.1)
