"""Drawing tokens, against running sums in Python, transformers' own filters and published SplitMix64 numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from alignment.rollout import sampling
from alignment.rollout.sampling import draw, sample, truncate, uniform

ALMOST_ONE = 1 - 2.0**-53


def uniforms(rows: int, seed: int = 0) -> Tensor:
    return torch.tensor([uniform(seed, row, 0) for row in range(rows)], dtype=torch.float64)


# ---- uniform numbers ------------------------------------------------------------------------------------------------
def test_the_generator_is_splitmix64() -> None:
    # The first numbers of Vigna's splitmix64.c from state 1234567, as Rosetta Code lists them.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [sampling._mix(1234567 + (i + 1) * 0x9E3779B97F4A7C15) for i in range(4)] == expected


def test_uniforms_are_uniform_and_unrelated() -> None:
    """Over positions of one completion, over first positions of many, and between neighbours of both kinds."""
    along = [uniform(3, 5, position) for position in range(4000)]
    across = [uniform(3, completion, 0) for completion in range(4000)]
    seeds = [uniform(seed, 0, 0) for seed in range(4000)]
    for numbers in (along, across, seeds):
        assert min(numbers) >= 0 and max(numbers) < 1
        assert stats.kstest(numbers, "uniform").pvalue > 0.01
        assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 0.05  # 3 standard errors of 1/sqrt(4000)
    assert (
        len({*along, *across, *seeds}) >= 12000 - 2
    )  # two numbers may be in two lists, having the same three integers


def test_a_seed_may_be_any_integer() -> None:
    assert len({uniform(seed, 0, 0) for seed in (0, 1, -1, 1 << 62, (1 << 62) + 1)}) == 5


# ---- drawing --------------------------------------------------------------------------------------------------------
def first_above(weights: list[float], number: float) -> int:
    """The definition: the first token at which the running sum passes number * total."""
    target = number * math.fsum(weights)
    return next(i for i, total in enumerate(itertools.accumulate(weights)) if total > target)


@pytest.mark.parametrize("vocabulary", [1, 5, 255, 256, 257, 1000, 5120])
def test_draw_inverts_the_running_sum(vocabulary: int) -> None:
    weights = torch.rand(50, vocabulary) ** 4
    numbers = uniforms(50)
    expected = [first_above(row, number) for row, number in zip(weights.double().tolist(), numbers.tolist())]
    assert draw(weights, numbers).tolist() == expected


@pytest.mark.parametrize("vocabulary", [7, 600])
def test_a_token_of_weight_zero_is_never_drawn(vocabulary: int) -> None:
    """Whatever the number; the possible tokens sit at the ends and at the borders of blocks."""
    possible = [i for i in (1, 5, 255, 256, 511, 598) if i < vocabulary]
    for count in range(1, len(possible) + 1):
        for chosen in itertools.combinations(possible, count):
            weights = torch.zeros(1, vocabulary)
            weights[0, list(chosen)] = torch.rand(count) * 1e-3 + 1e-6
            for number in (0.0, 2.0**-53, 0.3, 0.999999, ALMOST_ONE):
                assert int(draw(weights, torch.tensor([number], dtype=torch.float64))) in chosen


def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token() -> None:
    weights = torch.tensor([[0.0, 0.2, 0.5, 0.3, 0.0]])
    numbers = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    assert draw(weights.expand(2, -1), numbers).tolist() == [1, 3]


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5, 1.0])
    ids, _ = sample(logits.expand(20000, -1), uniforms(20000), temperature=0.7)
    expected = torch.softmax(logits.double() / 0.7, 0) * 20000
    assert stats.chisquare(torch.bincount(ids, minlength=5).numpy(), expected.numpy()).pvalue > 0.01


# ---- log-probs ------------------------------------------------------------------------------------------------------
def test_logprobs_are_tempered() -> None:
    # ln(1 / (1 + e^-4)) = -0.01815 at temperature 0.5; ln(1 / (1 + e^-2)) = -0.12693 at 1.
    logits, number = torch.tensor([[2.0, 0.0]]), torch.tensor([0.5], dtype=torch.float64)
    assert sample(logits, number, temperature=0.5)[1].item() == pytest.approx(-0.01815, abs=1e-5)
    assert sample(logits, number, temperature=1.0)[1].item() == pytest.approx(-0.12693, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.3}])
def test_logprobs_are_those_of_the_whole_vocabulary(dtype: torch.dtype, settings: dict) -> None:
    logits = (4 * torch.randn(20, 3000)).to(dtype)
    ids, logprobs = sample(logits, uniforms(20), temperature=1.3, **settings)
    expected = torch.log_softmax(logits.double() / 1.3, -1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)
    assert logprobs.dtype == torch.float32


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]])
    ids, logprobs = sample(logits, uniforms(2), temperature=0.0)
    assert ids.tolist() == [1, 0]  # of equals the first, as torch.argmax
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[[0, 1], [1, 0]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_nan(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = bad
    logprobs = sample(logits, uniforms(2), temperature=1.0)[1].tolist()
    assert math.isfinite(logprobs[0]) and math.isnan(logprobs[1])


def test_the_logits_are_left_alone() -> None:
    logits = torch.randn(3, 300)
    before = logits.clone()
    sample(logits, uniforms(3), temperature=0.5, top_k=3, top_p=0.5)
    assert torch.equal(logits, before)


# ---- top-k and top-p ------------------------------------------------------------------------------------------------
def test_truncation_by_hand() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert truncate(weights, top_k=2).tolist() == torch.tensor([[0.0, 0.4, 0.0, 0.3]]).tolist()
    # 0.4 < 0.6 <= 0.4 + 0.3: two tokens are the fewest that reach it.
    assert (truncate(weights, top_p=0.6) > 0).tolist() == [[False, True, False, True]]
    assert (truncate(weights, top_p=1e-9) > 0).tolist() == [[False, True, False, False]]
    # Of the three that top-k leaves, sum 0.9, two have 0.7 / 0.9 = 0.78; one alone 0.44.
    assert (truncate(weights, top_k=3, top_p=0.5) > 0).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 0.2), (0, 0.95), (8, 0.7), (900, 0.999)])
def test_truncation_keeps_what_transformers_keeps(top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(30, 700)
    theirs = logits
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = truncate(logits.softmax(-1), top_k=top_k, top_p=top_p)
    assert torch.equal(ours > 0, theirs > -math.inf)


def test_only_tokens_that_are_left_are_drawn() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(500, -1)
    counts = Counter(sample(logits, uniforms(500), temperature=1.0, top_k=2)[0].tolist())
    # e^3 / (e^3 + e^2) = 0.731: 365 of 500, standard deviation 10.
    assert counts.keys() == {1, 3} and 330 < counts[1] < 400
