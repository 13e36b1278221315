"""KTO and APO-zero on unpaired labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alignment.losses.kto import (
    KTO_LOSSES,
    apo_zero_unpaired,
    class_means,
    desirable_weights,
    kl_baseline,
    kto,
    mismatched,
    undesirable_weights,
)
from alignment.losses.options import choose


def test_kto(vector: Callable) -> None:
    v = vector("kto")
    logprobs, ref, label, p = v.leaf("logps"), v["ref_logps"], v["label"], v.params
    z0 = kl_baseline(v["kl_logps"], v["kl_ref_logps"])
    v.check("z0", z0)
    values, stats = kto(
        logprobs,
        ref,
        label,
        kl=z0,
        beta=p["beta"],
        desirable_weight=p["desirable_weight"],
        undesirable_weight=p["undesirable_weight"],
    )
    v.check("per_example", values)
    v.check("loss", values.mean())
    v.check_grad("grad_logps", values.mean(), logprobs)
    for side in ("chosen", "rejected"):
        v.check(f"rewards_{side}", stats[f"rewards/{side}"].nanmean())
    means = class_means(p["beta"] * (logprobs - ref).detach(), label)
    v.check("rewards_margins", means[2])
    assert not any(value.requires_grad for value in stats.values())


def test_kto_negative_kl_clamped(vector: Callable) -> None:
    v = vector("kto_negative_kl_clamped")
    z0 = kl_baseline(v["kl_logps"], v["kl_ref_logps"])
    v.check("z0", z0)
    v.check("raw_mean", (v["kl_logps"] - v["kl_ref_logps"]).mean())
    v.check("loss", kto(v["logps"], v["ref_logps"], v["label"], kl=z0, beta=v.params["beta"])[0].mean())


def test_kto_apo_zero_unpaired(vector: Callable) -> None:
    v = vector("kto_apo_zero_unpaired")
    v.check("loss", apo_zero_unpaired(v["logps"], v["ref_logps"], v["label"], beta=v.params["beta"])[0].mean())


def test_kto_mismatched_pairs(vector: Callable) -> None:
    v = vector("kto_mismatched_pairs")
    completions = v["completions"]
    assert [completions[row] for row in mismatched(4)] == v.expected["kl_completions"]
    v.leave("kl_completions")  # strings: compared above


def test_mismatch_is_a_rotation_that_no_row_escapes() -> None:
    """B52: n = 3: completions 0, 1, 2 go to prompts 1, 2, 0; a reversal would leave the middle one at home."""
    partner = mismatched(3)
    assert [partner.index(completion) for completion in range(3)] == [1, 2, 0]
    assert all(row != other for n in (2, 3, 7) for row, other in enumerate(mismatched(n)))
    with pytest.raises(ValueError, match="completions of other prompts, but 1 of 1 rows"):
        mismatched(1)


def test_the_mismatch_steps_over_rows_with_the_same_prompt() -> None:
    """Prompts a a b b b c: by 3, the completions of rows 3, 4, 5, 0, 1, 2."""
    prompts = "aabbbc"
    assert mismatched(6, by=3) == [3, 4, 5, 0, 1, 2]
    assert all(prompts[row] != prompts[other] for row, other in enumerate(mismatched(6, by=3)))
    with pytest.raises(ValueError, match="3 of 5 rows have the same prompt"):
        mismatched(5, by=3)


def test_a_batch_of_one_class_has_no_nan_in_its_loss() -> None:
    """B52: the missing class is absent from the means; loss and gradient are finite."""
    logprobs = torch.tensor([-3.0, -4.0], requires_grad=True)
    for label in (torch.tensor([True, True]), torch.tensor([False, False])):
        for values, stats in (
            kto(logprobs, torch.zeros(2), label, kl=torch.tensor(0.5), beta=0.1),
            apo_zero_unpaired(logprobs, torch.zeros(2), label, beta=0.1),
        ):
            assert torch.isfinite(values).all()
            assert torch.isfinite(torch.autograd.grad(values.sum(), logprobs)[0]).all()
            present, absent = ("chosen", "rejected") if label.all() else ("rejected", "chosen")
            assert torch.isfinite(stats[f"rewards/{present}"]).all()
            assert stats[f"rewards/{absent}"].isnan().all()  # the meter counts NaN as absent
        chosen, rejected, margin = class_means(logprobs.detach(), label)
        assert margin.isnan()
        assert chosen.isnan() != rejected.isnan()


def test_the_kl_term() -> None:
    """B53: beta 0.1, log-ratio 3, KL 1: desirable 1 - sigmoid(0.2) = 0.45017, undesirable 0.54983."""
    logprobs = torch.tensor([3.0, 3.0], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([True, False])
    values, _ = kto(logprobs, torch.zeros(2).double(), label, kl=torch.tensor(1.0).double(), beta=0.1)
    torch.testing.assert_close(values, torch.tensor([0.4501660, 0.5498340]).double(), rtol=1e-6, atol=0)
    assert kl_baseline(torch.tensor([2.0, 8.0, 4.0, 6.0]), torch.zeros(4)) == 5
    assert kl_baseline(torch.tensor([-2.0, -2.0]), torch.zeros(2)) == 0
    kl_rows = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values, _ = kto(
        logprobs, torch.zeros(2).double(), label, kl=kl_baseline(kl_rows, torch.zeros(2).double()), beta=0.1
    )
    values.sum().backward()
    assert kl_rows.grad is None
    assert logprobs.grad is not None


def test_the_clamp_comes_after_the_mean_of_all_ranks() -> None:
    """B53: ranks with means -1 and 3 have z0 = 1 together; clamped each first it would be 1.5."""
    ranks = [torch.tensor([-1.0, -1.0]), torch.tensor([3.0, 3.0])]
    assert kl_baseline(torch.cat(ranks), torch.zeros(4)) == 1


def test_kto_weight_range(vector: Callable) -> None:
    v = vector("kto_weight_range")
    n = int(v["n_desirable"]), int(v["n_undesirable"])
    found = desirable_weights(*n, undesirable_weight=v.params["undesirable_weight"])
    v.check("desirable_weight_range", torch.tensor(found, dtype=torch.float64))
    found = undesirable_weights(*n, desirable_weight=1.0)
    v.check("undesirable_weight_range_if_desirable_1", torch.tensor(found, dtype=torch.float64))


@pytest.mark.parametrize("name", KTO_LOSSES)
def test_properties(name: str) -> None:
    """gradcheck, row order, split into microbatches at a given z0, reference shift, extremes."""
    options = {"kl": torch.tensor(0.3).double()} if name == "kto" else {}
    loss = choose(KTO_LOSSES, name, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7, **options)
    logprobs, ref = (torch.randn(5, dtype=torch.float64) * 3 for _ in range(2))
    logprobs.requires_grad_()
    label = torch.tensor([True, False, False, True, True])
    assert torch.autograd.gradcheck(lambda x: loss(x, ref, label)[0], logprobs)
    values, _ = loss(logprobs, ref, label)
    order = torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(loss(logprobs[order], ref[order], label[order])[0], values[order])
    torch.testing.assert_close(loss(logprobs + 5, ref + 5, label)[0], values)
    parts = [loss(logprobs[i : i + 1], ref[i : i + 1], label[i : i + 1])[0] for i in range(5)]
    torch.testing.assert_close(torch.cat(parts), values)
    far = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0], requires_grad=True)
    values, _ = loss(far, torch.zeros(5), label)
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), far)[0]).all()


def test_what_a_loss_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match="apo_zero_unpaired cannot use kl"):
        choose(KTO_LOSSES, "apo_zero_unpaired", beta=0.1, kl=torch.tensor(1.0))
    with pytest.raises(ValueError, match="kto needs kl"):
        choose(KTO_LOSSES, "kto", beta=0.1)
