"""Kahneman-Tversky Optimization: learn from single answers that are desirable or not."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.algorithm.unpaired import UnpairedModule, labels
from alignment.batch import Batch, Example, collate
from alignment.data.encode import Limits, fit
from alignment.errors import UserError
from alignment.losses.kto import KTO_LOSSES, desirable_weights, kl_baseline, mismatched, undesirable_weights
from alignment.losses.reduce import sequence_logprobs
from alignment.ref_strategy.store import example_key

log = logging.getLogger("alignment")


class KTO(UnpairedModule):
    """KTO (2402.01306), and APO-zero on unpaired labels (2408.06266).

    KTO's z0 is the mean log-ratio of policy to reference over the mismatched pairs (see `kl_pairs`) of all rows of the
    optimizer step and of all ranks, clamped at 0 after the mean. It is taken before the first microbatch, without
    gradient: loss and gradient do not depend on how the step is cut, and a microbatch of one row is as good as any.

    Departs from the usual code, where z0 is a mean over one microbatch, and changes with its size. In evaluation z0 is
    the mean over the pairs of all held-out rows.
    """

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: Literal["kto", "apo_zero_unpaired"],
        desirable_weight: float,
        undesirable_weight: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.desirable_weight, self.undesirable_weight = beta, desirable_weight, undesirable_weight
        self.uses_kl = loss == "kto"
        self.loss = functools.partial(
            KTO_LOSSES[loss], beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
        )
        self._pairs: dict[str, list[Example]] = {}
        self._kl: tuple[int, Tensor] | None = None  # optimizer steps done when it was measured
        self._heldout_kl: Tensor | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kl = {"kl": self._baseline()} if self.uses_kl else {}
        policy, reference, desirable = self.sums(batch)
        values, stats = self.loss(policy, reference, desirable, **kl)
        if self.uses_kl:
            stats["z0"] = stats.pop("kl")  # val/kl is that of samples
        return self.unpaired_mean(values, stats, desirable, batch)

    # ---- z0 -------------------------------------------------------------------------------------------------------
    def reference_examples(self, data: Any) -> list[Example]:
        pairs = [*self.pairs_of("train", data), *self.pairs_of("heldout", data)] if self.uses_kl else []
        return [*super().reference_examples(data), *pairs]

    def pairs_of(self, name: str, data: Any) -> list[Example]:
        """The mismatched pair of every row of data.train or data.heldout, in their order; made once."""
        if name not in self._pairs:
            self._pairs[name] = kl_pairs(getattr(data, name), bos=self.source.tokenizer.bos_token_id)
        return self._pairs[name]

    def _baseline(self) -> Tensor:
        """z0 of this optimizer step, or of the held-out rows."""
        if not self.trainer.training:
            if self._heldout_kl is None:
                self._heldout_kl = self.kl_estimate(self.pairs_of("heldout", self.data))
            return self._heldout_kl
        if self._kl is None or self._kl[0] != self.global_step:
            pairs, loader = self.pairs_of("train", self.data), self.trainer.train_dataloader
            assert loader is not None
            rows = loader.dataset.stream.take(self.global_step * self.batch_size, self.batch_size)
            self._kl = self.global_step, self.kl_estimate([pairs[row] for row in rows])
        return self._kl[1]

    @torch.no_grad()
    def kl_estimate(self, pairs: Sequence[Example]) -> Tensor:
        """z0 over all pairs, a scalar; each rank scores its share of them."""
        share = pairs[self.trainer.global_rank :: self.trainer.world_size]
        mine, total = sorted(share, key=_length, reverse=True), 0.0
        for start in range(0, len(mine), self.microbatch_size):
            batch = collate(mine[start : start + self.microbatch_size]).to(self.device)
            reference = self.reference_logprobs(batch)
            assert reference is not None
            ratios = sequence_logprobs(self.logprobs(batch).logprobs - reference, batch.loss_mask)
            total += float(ratios.double().sum())
        (table,) = self._sum_over_ranks(torch.tensor([[total, len(mine)]], dtype=torch.float64))
        mean = (table[0] / table[1]).to(self.device, torch.float32)
        return kl_baseline(mean, torch.zeros_like(mean))

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._heldout_kl = None

    # ---- balance --------------------------------------------------------------------------------------------------
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.trainer.is_global_zero:
            self._check_balance(labels(self.data.train))

    def _check_balance(self, desirable: Sequence[bool]) -> None:
        """Warn where the classes weigh other than KTO's eq. 8 asks for."""
        good, bad = sum(desirable), len(desirable) - sum(desirable)
        if not good or not bad:
            log.warning("all %d rows are %s: there is no other class to learn from", good + bad, _name(good > 0))
            return
        low, high = desirable_weights(good, bad, undesirable_weight=self.undesirable_weight)
        if not low <= self.desirable_weight <= high:
            others = undesirable_weights(good, bad, desirable_weight=self.desirable_weight)
            log.warning(
                "%d desirable and %d undesirable rows weigh %.3g to 1, KTO's eq. 8 asks for 1 to 4/3: type "
                "algorithm.desirable_weight=<%.4g to %.4g> or algorithm.undesirable_weight=<%.4g to %.4g>",
                good,
                bad,
                self.desirable_weight * good / max(self.undesirable_weight * bad, 1e-12),
                low,
                high,
                *others,
            )


def kl_pairs(examples: Sequence[Example], *, bos: int | None = None) -> list[Example]:
    """Each example's prompt with the completion of another prompt: what KTO's z0 is measured on.

    The usual rotation by one, over all rows in place of one microbatch: in an order that depends on their content
    alone, rows with the same prompt next to each other, and further than the largest of those groups, so that no prompt
    gets one of its own completions and every completion comes once. The pairs depend neither on batch sizes, ranks or
    seeds nor on the order of the rows, so their reference log-probs can be stored. A prompt is cut at its beginning
    where the pair would be longer than the longest example. UserError where most rows have the same prompt.
    """
    if not examples:
        return []
    prompts = [example_key(Example(example.prompt_ids)) for example in examples]
    order = sorted(range(len(examples)), key=lambda row: (prompts[row], example_key(examples[row])))
    try:
        partners = mismatched(len(examples), by=max(Counter(prompts).values()))
    except ValueError as error:
        raise UserError(f"data: {error}") from error
    limits = Limits(None, None, max(map(_length, examples)), "keep_end")
    pairs: dict[int, Example] = {}
    for place, partner in enumerate(partners):
        row, other = order[place], examples[order[partner]]
        fitted = fit(examples[row].prompt_ids, other.completions, limits, bos)
        assert not isinstance(fitted, str), "a prompt is shorter than the longest example"
        pairs[row] = Example(fitted[0], other.completions, other.loss_masks)
    return [pairs[row] for row in range(len(examples))]


def _length(example: Example) -> int:
    return len(example.prompt_ids) + sum(map(len, example.completions))


def _name(desirable: bool) -> str:
    return "desirable" if desirable else "undesirable"
