"""TPO: triples of gold, chosen and rejected."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignment.losses.dpo import Pairs
from alignment.losses.options import choose
from alignment.losses.reduce import reduce_loss
from alignment.losses.sft import nll
from alignment.losses.tpo import TPO_LOSSES, split_triples


def test_tpo_l(vector: Callable) -> None:
    v = vector("tpo_l")
    beta, gamma = v.params["beta"], v.params["gamma"]
    c, r = v["avg_logp_chosen"], v["avg_logp_rejected"]
    zero, one = torch.zeros_like(c), torch.ones_like(c)
    values = choose(TPO_LOSSES, "tpo_l", beta=beta, gamma_beta_ratio=gamma / beta)(Pairs(c, r, zero, zero, one, one))
    v.check("loss", values.mean() + v.params["tpo_alpha"] * v["gold_nll_token_mean"])


def test_triples_by_hand() -> None:
    """Gold -1 -1; chosen -2; rejected -3 -4: sums -2 and -7, beta 0.1: log(1 + e^-0.5); gold NLL per token 1."""
    logprobs = torch.tensor([[-1.0, -1.0], [-2.0, 0.0], [-3.0, -4.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    gold, gold_mask, pairs = split_triples(logprobs, mask)
    assert choose(TPO_LOSSES, "tpo", beta=0.1)(pairs).item() == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert pairs.num_rejected.tolist() == [2]
    assert reduce_loss(nll(gold), gold_mask) == 1
    twice = split_triples(torch.cat([logprobs, 2 * logprobs]), torch.cat([mask, mask]))
    assert twice[0].tolist() == [[-1, -1], [-2, -2]]
    assert twice[2].chosen.tolist() == [-2, -4]
    with pytest.raises(ValueError, match="4 rows are not triples"):
        split_triples(torch.zeros(4, 1), torch.ones(4, 1).bool())
