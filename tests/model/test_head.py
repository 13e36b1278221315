"""The chunked vocabulary head against torch's own log_softmax, in values, gradients and memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.errors import UserError
from alignment.model.head import LogitMap, head_scores

RTOL, ATOL = 1e-5, 1e-7
STATS = ("entropy", "log_sum_sq_probs", "is_top1")


def make_head(
    *, width: int = 6, vocab: int = 11, bias: bool = False, trained: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(width, vocab, bias=bias, dtype=dtype)
    return head.requires_grad_(trained)


def rows(tokens: int, *, width: int = 6, vocab: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    return hidden, torch.randint(0, vocab, (tokens,), generator=generator)


def expected(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float = 1.0) -> Tensor:
    logprobs = F.log_softmax(head(hidden).float() / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1)


class Largest(TorchDispatchMode):
    """Largest tensor any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_equals_log_softmax_in_value_and_gradient(bias: bool, trained: bool, chunk_tokens: int) -> None:
    head = make_head(bias=bias, trained=trained)
    hidden, targets = rows(7)
    weights = torch.linspace(-1, 2, 7)
    leaves = [hidden.requires_grad_(), *(p for p in head.parameters() if trained)]
    want = expected(hidden, head, targets, temperature=0.5)
    got = head_scores(hidden, head, targets, logit_map=LogitMap().at_temperature(0.5), chunk_tokens=chunk_tokens)[
        "logprobs"
    ]
    torch.testing.assert_close(got, want, rtol=RTOL, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), leaves),
        torch.autograd.grad((want * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=RTOL, atol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_gradcheck(trained: bool, softcap: float | None) -> None:
    head = make_head(bias=True, trained=trained, dtype=torch.float64)
    hidden, targets = rows(5, dtype=torch.float64)

    def logprobs(hidden: Tensor, *_: Tensor) -> Tensor:
        return head_scores(hidden, head, targets, logit_map=LogitMap(1.3, softcap), chunk_tokens=2)["logprobs"]

    assert gradcheck(logprobs, (hidden.requires_grad_(), *head.parameters()))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_label_smoothing_from_the_mean_over_the_vocabulary(trained: bool, chunk_tokens: int) -> None:
    """Against torch's cross entropy on full logits: it spreads the same share evenly over the vocabulary."""
    head = make_head(bias=True, trained=trained)
    hidden, targets = rows(7)
    weights = torch.linspace(-1, 2, 7)
    leaves = [hidden.requires_grad_(), *(p for p in head.parameters() if trained)]
    want = F.cross_entropy(head(hidden), targets, label_smoothing=0.3, reduction="none")
    scores = head_scores(hidden, head, targets, chunk_tokens=chunk_tokens, stats=["vocab_mean"])
    got = -0.7 * scores["logprobs"] - 0.3 * scores["vocab_mean"]
    torch.testing.assert_close(got, want, rtol=RTOL, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), leaves),
        torch.autograd.grad((want * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=RTOL, atol=1e-6)


def test_gradcheck_of_entropy() -> None:
    head = make_head(trained=True, dtype=torch.float64)
    hidden, targets = rows(5, dtype=torch.float64)

    def entropy(hidden: Tensor, *_: Tensor) -> Tensor:
        return head_scores(hidden, head, targets, chunk_tokens=2, entropy_grad=True)["entropy"]

    assert gradcheck(entropy, (hidden.requires_grad_(), *head.parameters()))


def test_token_statistics_of_the_shared_vectors() -> None:
    """Numbers of `token_stats_from_logits`: logits go through an identity head."""
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0], [0.1, 0.2, 0.3, 0.4], [-1.0, 3.0, 0.5, 0.0]])
    head = nn.Linear(4, 4, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(4))
    for entropy_grad in (False, True):
        scores = head_scores(logits, head, torch.tensor([0, 2, 1]), stats=STATS, entropy_grad=entropy_grad)
        assert scores["logprobs"].tolist() == pytest.approx([-0.3423496, -1.342536, -0.1399252], abs=1e-6)
        assert scores["entropy"].tolist() == pytest.approx([0.8782812, 1.380071, 0.511896], abs=1e-6)
        assert scores["log_sum_sq_probs"].tolist() == pytest.approx([-0.6164972, -1.373917, -0.2703435], abs=1e-6)
        assert scores["is_top1"].tolist() == [True, False, True]


def test_statistics_leave_the_logprobs_bit_equal() -> None:
    head = make_head()
    hidden, targets = rows(9)
    plain = head_scores(hidden, head, targets, chunk_tokens=4)["logprobs"]
    assert torch.equal(head_scores(hidden, head, targets, chunk_tokens=4, stats=STATS)["logprobs"], plain)
    with_grad = head_scores(hidden.clone().requires_grad_(), head, targets, chunk_tokens=4)["logprobs"]
    assert torch.equal(with_grad.detach(), plain)
    assert torch.equal(head_scores(hidden, make_head(trained=True), targets, chunk_tokens=4)["logprobs"], plain)


def test_temperature_divides_the_logits() -> None:
    """B18: logits [2, 0]: T = 0.5 gives log sigmoid(4) = -0.01815, T = 1 log sigmoid(2) = -0.12693."""
    head = nn.Linear(1, 2, bias=False).requires_grad_(False)
    head.weight.copy_(torch.tensor([[2.0], [0.0]]))
    for temperature, want in ((0.5, -0.018150), (1.0, -0.126928)):
        scores = head_scores(
            torch.ones(1, 1), head, torch.tensor([0]), logit_map=LogitMap().at_temperature(temperature)
        )
        assert scores["logprobs"].item() == pytest.approx(want, abs=1e-6)
    with pytest.raises(UserError, match="greedy decoding has no log-probs"):
        LogitMap().at_temperature(0.0)


def test_bf16_product_is_upcast_before_the_softmax() -> None:
    """B20: 32k words. The reference takes the same bf16 logits to float64; without the upcast it is 1e-2 off."""
    head = make_head(width=16, vocab=32_000, dtype=torch.bfloat16)
    hidden, targets = rows(20, width=16, vocab=32_000, dtype=torch.bfloat16)
    want = F.log_softmax(head(hidden).double(), -1).gather(-1, targets[:, None]).squeeze(-1)
    got = head_scores(hidden, head, targets)["logprobs"]
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 1e-4
    assert (F.log_softmax(head(hidden), -1).gather(-1, targets[:, None]).squeeze(-1) - want).abs().max() > 5e-3


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_gradients_follow_plain_autocast(trained: bool) -> None:
    head = make_head(width=32, vocab=500, trained=trained)
    hidden, targets = rows(400, width=32, vocab=500)
    leaves = [hidden.requires_grad_(), *(p for p in head.parameters() if trained)]
    exact = torch.autograd.grad(expected(hidden, head, targets).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        got = head_scores(hidden, head, targets)["logprobs"]
        want = expected(hidden, head, targets)
    torch.testing.assert_close(got, want, rtol=RTOL, atol=1e-6)  # same bf16 product, same softmax
    for mine, theirs, true in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), exact, strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - true).norm() <= 1.05 * (theirs - true).norm()  # no less exact than autograd's own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confident_token_keeps_its_small_gradient(dtype: torch.dtype) -> None:
    """Two words, logits (12, 0): 1 - p = 6.14e-6, so d logprob / dh = (1 - p) (w_0 - w_1) = 6.14e-6 * 12 for h = 1."""
    head = nn.Linear(1, 2, bias=False, dtype=dtype).requires_grad_(False)
    head.weight.copy_(torch.tensor([[12.0], [0.0]]))
    hidden = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype):
        logprob = head_scores(hidden, head, torch.tensor([0]))["logprobs"]
    logprob.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(12 / (1 + math.exp(12)), rel=1e-2)


class Odd(nn.Module):
    """A head that is no nn.Linear, like one with an adapter on it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.calls = linear, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(hidden)


def test_other_heads_are_recomputed_chunk_by_chunk() -> None:
    plain = make_head(trained=True)
    hidden, targets = rows(7)
    hidden.requires_grad_()
    odd = Odd(plain)
    got = head_scores(hidden, odd, targets, chunk_tokens=3, stats=STATS)
    want = head_scores(hidden, plain, targets, chunk_tokens=3, stats=STATS)
    leaves = [hidden, plain.weight]
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=RTOL, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(got["logprobs"].sum(), leaves),
        torch.autograd.grad(want["logprobs"].sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=RTOL, atol=1e-6)
    assert odd.calls == 6  # three chunks, forward and again in backward
    assert not got["entropy"].requires_grad


@pytest.mark.parametrize("kind", ["frozen", "trained", "odd"])
def test_memory_follows_the_chunk_not_the_tokens(kind: str) -> None:
    """The largest tensor of forward + backward is chunk x vocabulary, however many tokens there are."""
    vocab, chunk = 512, 64
    largest = {}
    for tokens in (1024, 4096):
        head: nn.Module = make_head(width=4, vocab=vocab, trained=kind != "frozen")
        head = Odd(head) if kind == "odd" and isinstance(head, nn.Linear) else head
        hidden, targets = rows(tokens, width=4, vocab=vocab)
        with Largest() as seen:
            scores = head_scores(hidden.requires_grad_(), head, targets, chunk_tokens=chunk, stats=STATS)
            scores["logprobs"].sum().backward()
        largest[tokens] = seen.elements
    assert largest == {1024: chunk * vocab, 4096: chunk * vocab}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("odd", [False, True])
def test_no_tokens_give_empty_scores_with_a_gradient_path(trained: bool, odd: bool) -> None:
    head: nn.Module = make_head(trained=trained)
    head = Odd(head) if odd and isinstance(head, nn.Linear) else head
    hidden, targets = rows(0)
    scores = head_scores(hidden.requires_grad_(), head, targets, stats=STATS)
    assert all(value.shape == (0,) for value in scores.values())
    scores["logprobs"].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 6)


def test_hooks_of_the_head_see_the_computation() -> None:
    head = make_head()
    calls = []
    head.register_forward_pre_hook(lambda *_: calls.append("before"))
    head.register_forward_hook(lambda *_: calls.append("after"))
    head_scores(rows(3)[0], head, rows(3)[1])
    assert calls == ["before", "after"]
    assert "forward" not in vars(head)


def test_unknown_statistic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown statistics \['entrop'\]: choose from entropy"):
        head_scores(rows(2)[0], make_head(), rows(2)[1], stats=("entrop",))
