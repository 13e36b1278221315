"""Masked means, the named reductions, moments that merge, whitening."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.losses.reduce import (
    REDUCTIONS,
    average_logprobs,
    masked_mean,
    masked_sum,
    moments,
    no_moments,
    reduce_loss,
    sequence_logprobs,
    step_count,
    whiten,
)
from alignment.losses.sft import nll

NAN = float("nan")
# Dr. GRPO's constant goes only to the reduction that divides by it.
MODES = [(name, {"max_tokens": 8} if name == "constant" else {}) for name in REDUCTIONS]


def mask_of(*lengths: int, width: int) -> Tensor:
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def test_masked_sum_and_mean_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN]]), mask_of(2, 1, width=3)
    assert masked_sum(values, mask) == 7
    assert masked_sum(values, mask, -1).tolist() == [3, 4]
    assert masked_mean(values, mask) == pytest.approx(7 / 3)
    assert masked_mean(values, mask, -1).tolist() == [1.5, 4]
    assert masked_mean(torch.tensor([[2.0], [6.0]]), torch.tensor([[True, True], [True, False]])) == pytest.approx(
        10 / 3
    )
    assert sequence_logprobs(values, mask).tolist() == [3, 4]
    assert average_logprobs(values, mask_of(2, 0, width=3)).tolist() == [1.5, 0]


def test_padding_with_nan_has_no_gradient() -> None:
    values = torch.tensor([[1.0, NAN, float("inf")]], requires_grad=True)
    masked_mean(values, mask_of(1, width=3)).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 0, 0]]


def test_masked_tokens_leave_numerator_and_denominator() -> None:
    """B26: one mask for both; nothing left gives exactly 0, with a gradient path."""
    values = torch.ones(2, 6, requires_grad=True)
    mask = mask_of(4, 0, width=6)
    for name in ("token_mean", "seq_mean_token_mean", "microbatch_token_mean"):
        assert reduce_loss(values, mask, name) == 1.0
    for name, options in MODES:
        empty = reduce_loss(values, torch.zeros_like(mask), name, **options)
        (gradient,) = torch.autograd.grad(empty, values)
        assert empty == 0
        assert not gradient.any()


def test_reductions_are_what_their_names_say() -> None:
    """B27: row A 2 tokens at +1, row B 4 tokens at -1, longest completion 8."""
    values, mask = torch.tensor([[1.0] * 4, [-1.0] * 4]), mask_of(2, 4, width=4)
    wanted = {
        "seq_mean_token_mean": 0.0,  # (1 - 1) / 2
        "token_mean": -2 / 6,
        "microbatch_token_mean": -2 / 6,
        "constant": -2 / (2 * 8),
        "seq_mean_token_sum": (2 - 4) / 2,
        "row_mean_token_sum": (2 - 4) / 2,
    }
    assert {name: pytest.approx(float(reduce_loss(values, mask, name, **o))) for name, o in MODES} == wanted
    # A third row without tokens counts only where rows are counted as such.
    values, mask = torch.cat([values, values[:1]]), mask_of(2, 4, 0, width=4)
    wanted |= {"constant": -2 / (3 * 8), "row_mean_token_sum": -2 / 3}
    assert {name: pytest.approx(float(reduce_loss(values, mask, name, **o))) for name, o in MODES} == wanted


@pytest.mark.parametrize(("name", "options"), MODES)
def test_a_step_of_microbatches_is_one_batch(name: str, options: dict) -> None:
    """B22, B23: 4 rows as one batch, or as 2 ranks x 2 microbatches whose averages the trainer and DDP undo."""
    values = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    mask = mask_of(1, 5, 0, 2, width=5)
    whole = reduce_loss(values, mask, name, **options)
    parts = list(zip(values.split(1), mask.split(1), strict=True))
    count = torch.stack([step_count(m, name) for _, m in parts]).sum()
    shares = [reduce_loss(v, m, name, count=count, scale=4, **options) for v, m in parts]
    step = torch.stack(shares).mean()  # what accumulation over 2 and DDP over 2 make of it
    gradients = [torch.autograd.grad(loss, values)[0] for loss in (whole, step)]
    if name == "microbatch_token_mean":  # BNPO: a mean of microbatch means, 0 for the empty row
        assert float(step.detach()) == pytest.approx(float(masked_mean(values.detach(), mask, -1).sum() / 4))
    else:
        torch.testing.assert_close(step, whole)
        torch.testing.assert_close(*gradients)


def test_token_nll_of_two_microbatches() -> None:
    """B22: one token of NLL 4 and three of NLL 1: (4 + 3) / 4 = 1.75; the mean of means is 2.5."""
    logprobs = [torch.tensor([[-4.0]], requires_grad=True), torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)]
    masks = [torch.ones_like(x, dtype=torch.bool) for x in logprobs]
    count = sum(int(step_count(m, "token_mean")) for m in masks)
    losses = [reduce_loss(nll(x), m, count=count, scale=2) for x, m in zip(logprobs, masks, strict=True)]
    assert float(sum(loss.detach() for loss in losses)) / 2 == 1.75
    assert torch.autograd.grad(losses[0] / 2, logprobs[0])[0].tolist() == [[-0.25]]
    assert torch.autograd.grad(losses[1] / 2, logprobs[1])[0].tolist() == [[-0.25] * 3]


@pytest.mark.parametrize(("name", "options"), MODES)
def test_padding_and_row_order_do_not_matter(name: str, options: dict) -> None:
    values, mask = torch.randn(3, 4, dtype=torch.float64), mask_of(4, 1, 2, width=4)
    loss = reduce_loss(values, mask, name, **options)
    padded = torch.nn.functional.pad(values, (0, 3), value=NAN), torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(reduce_loss(*padded, name, **options), loss)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(reduce_loss(values[order], mask[order], name, **options), loss)


def test_options_that_do_not_fit_are_refused() -> None:
    values, mask = torch.ones(1, 2), mask_of(2, width=2)
    with pytest.raises(ValueError, match="token_mean, microbatch_token_mean"):
        reduce_loss(values, mask, "mean")
    with pytest.raises(ValueError, match="max_tokens"):
        reduce_loss(values, mask, "constant")
    with pytest.raises(ValueError, match="'token_mean' cannot use it"):
        reduce_loss(values, mask, "token_mean", max_tokens=8)


def test_sft_grad_accumulation(vector: Callable) -> None:
    v = vector("sft_grad_accumulation")
    losses, masks = -v["micro_logps"], v["micro_mask"]
    count = sum(int(step_count(m, "token_mean")) for m in masks)
    accumulate, world = v.params["accumulation_steps"], v.params["world_size"]
    plain = [reduce_loss(x, m, count=count) for x, m in zip(losses, masks, strict=True)]
    v.check("micro_losses_to_backward", torch.stack(plain))
    v.check("correct_global_token_mean", torch.stack(plain).sum())
    scale = accumulate * world
    v.check("ddp_rank_losses_if_averaged_by_ddp", torch.stack([x * scale for x in plain]))
    means = [reduce_loss(x, m, "microbatch_token_mean", count=2) for x, m in zip(losses, masks, strict=True)]
    v.check("wrong_mean_of_micro_means", torch.stack(means).sum())


def test_dp_invariant_token_mean(vector: Callable) -> None:
    """Two ranks whose losses DDP averages: 8 tokens that sum to 10, 2 that sum to 2."""
    v = vector("dp_invariant_token_mean")
    counts = v["rank_token_counts"].long().tolist()
    rows = [torch.full((1, n), float(s / n), dtype=torch.float64) for s, n in zip(v["rank_token_loss_sums"], counts)]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    shares = [reduce_loss(x, m, count=sum(counts), scale=2) for x, m in zip(rows, masks, strict=True)]
    v.check("rank_losses_to_backward", torch.stack(shares))
    v.check("ddp_averaged_loss", torch.stack(shares).mean())
    v.check("wrong_local_mean_average", torch.stack([reduce_loss(x, m) for x, m in zip(rows, masks)]).mean())


def test_running_moments(vector: Callable) -> None:
    v = vector("running_moments")
    state = no_moments(torch.zeros((), dtype=torch.float64))
    for batch, wanted in zip(v["batches"], v.expected["after_each"], strict=True):
        state = state.merge(moments(batch))
        found = {
            "mean": state.mean,
            "var": state.var,
            "std_ddof1": state.unbiased_var.sqrt(),
            "count": state.count,
        }
        assert {key: float(value) for key, value in found.items()} == pytest.approx(wanted, rel=1e-7)
    v.leave("after_each")  # a list of dicts: compared above


def test_merged_moments_are_those_of_one_process() -> None:
    """B59: whatever the split over ranks, empty ranks included."""
    values = torch.randn(4, 7, dtype=torch.float64)
    mask = mask_of(7, 0, 3, 5, width=7)
    whole = moments(values, mask)
    merged = no_moments(values)
    for row, kept in zip(values, mask, strict=True):
        merged = merged.merge(moments(row, kept))
    torch.testing.assert_close(torch.stack(merged), torch.stack(whole))
    parts = [whiten(values[rows], mask[rows], of=merged) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(torch.cat(parts), whiten(values, mask))


def test_masked_whiten(vector: Callable) -> None:
    v = vector("masked_whiten")
    values, mask = v["values"], v["mask"]
    v.check("shift_mean_true", whiten(values, mask))
    v.check("shift_mean_false", whiten(values, mask, shift_mean=False))
    over = moments(values, mask)
    v.check("mean", over.mean)
    v.check("var_ddof1", over.unbiased_var)
    one = torch.tensor([[5.0]], dtype=torch.float64)
    v.check("single_element", whiten(one, torch.ones_like(one, dtype=torch.bool)))


def test_whitening_uses_only_the_mask() -> None:
    """B59: [1, 2, 3] has mean 2 and ddof-1 std 1 (population std 0.8165 would give 1.2247); 99 is padding."""
    values, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), mask_of(3, width=4)
    torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))
    assert whiten(torch.randn(2, 3), mask_of(3, 3, width=3)).shape == (2, 3)
    assert not whiten(torch.tensor([[7.0, NAN]]), mask_of(1, width=2)).any()
    assert not whiten(torch.tensor([[7.0]]), mask_of(0, width=1)).any()
    assert not whiten(torch.full((2, 2), 3.0), mask_of(2, 2, width=2)).any()
