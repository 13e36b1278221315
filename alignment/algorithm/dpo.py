"""Direct Preference Optimization and its relatives: learn from pairs, against a reference."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.base import refusal
from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.dpo import SORTED_LOSSES, pair_loss, weighted_losses, wpo_weights

PairLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
]


class DPO(PairModule):
    """DPO (2305.18290) eq. 7, and every loss of `losses/dpo.py`, alone or several with weights.

    loss_weights: one weight per loss where `loss` is a list (MPO 2411.10442). nll_weight adds the mean negative
    log-likelihood of the chosen answers, over all their tokens of the step (RPO 2405.16436; ruling D23).
    """

    reference_need: ClassVar[str] = "required"
    # Losses of quantiles of a step's pairs: validation wants the step in one microbatch for them.
    sorted_losses: ClassVar[tuple[str, ...]] = ("aot", "aot_unpaired")

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: PairLoss | list[PairLoss],
        loss_weights: list[float] | None,
        label_smoothing: float,
        length_average: bool | None,
        tau: float | None,
        divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
        divergence_alpha: float | None,
        ld_alpha: float,
        wpo: bool,
        nll_weight: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.ld_alpha, self.wpo, self.nll_weight = beta, ld_alpha, wpo, nll_weight
        names: list[str] = [loss] if isinstance(loss, str) else list(loss)
        if wpo and (sorts := SORTED_LOSSES.intersection(names)):
            raise UserError(
                f"algorithm.wpo: {min(sorts)} sorts the batch, no weight belongs to a pair: type algorithm.wpo=false"
            )
        options = {"label_smoothing": label_smoothing or None, "length_average": length_average, "tau": tau}
        options |= {"divergence": divergence, "alpha": divergence_alpha}
        try:
            losses = {name: pair_loss(name, beta=beta, **options) for name in names}
            self.pair_loss = weighted_losses(losses, _weights(names, loss_weights))
        except ValueError as error:
            raise refusal(error, alpha="divergence_alpha") from error

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.scores(batch, *(["log_sum_sq_probs"] if self.wpo else []))
        values = self.pair_loss(self.pairs(scores.logprobs, batch, ld_alpha=self.ld_alpha))
        if self.wpo:
            weights, stats = wpo_weights(scores.logprobs, scores.log_sum_sq_probs, batch.loss_mask)
            values = values * weights
            self.log_stats(stats)
        return self.pair_mean(values, scores.logprobs, batch, nll_weight=self.nll_weight)


def _weights(names: list[str], weights: list[float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if len(weights) != len(names):
        raise ValueError(
            f"{len(names)} losses need as many weights, got {len(weights)}: type algorithm.loss_weights=[...]"
        )
    return dict(zip(names, weights, strict=True))
