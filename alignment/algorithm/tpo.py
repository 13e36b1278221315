"""TPO: a preference between two answers beside the likelihood of a third, the gold one; no reference."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from alignment.algorithm.base import refusal
from alignment.algorithm.pairs import PairModule
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.options import choose
from alignment.losses.tpo import TPO_LOSSES, split_triples


class TPO(PairModule):
    """TPO (2405.16681) on lists of gold, chosen, rejected; loss=tpo_l is its length-normalised form with a margin."""

    data_form: ClassVar[str] = "ranked"
    nll_name: ClassVar[str] = "nll_gold"

    def __init__(
        self,
        *passed: Any,
        beta: float,
        loss: Literal["tpo", "tpo_l"],
        gamma_beta_ratio: float | None,
        nll_weight: float,
        **common: Any,
    ) -> None:
        super().__init__(*passed, **common)
        self.beta, self.nll_weight = beta, nll_weight
        self.rewards_per_token = loss == "tpo_l"
        try:
            self.pair_loss = choose(TPO_LOSSES, loss, beta=beta, gamma_beta_ratio=gamma_beta_ratio)
        except ValueError as error:
            raise refusal(error) from error

    def setup(self, stage: str) -> None:
        """Before weights load: all lists have one length, which the encoding has seen to, and it must be three."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for examples in (data.train, data.heldout):
            if examples and (size := len(examples[0].completions)) != 3:
                first = str(examples[0].columns.get("prompt"))[:80]
                raise UserError(
                    f"data: TPO learns from gold, chosen and rejected answers, but lists have {size} (the first: "
                    f"{first}): type algorithm={'dpo' if size == 2 else 'pl_dpo'}, or give each prompt three"
                )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs = self.scores(batch).logprobs
        _, _, pairs = split_triples(logprobs, batch.loss_mask)
        self.log_pairs(pairs)
        return self.pair_mean(self.pair_loss(pairs), logprobs, batch, nll_weight=self.nll_weight)
