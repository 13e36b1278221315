"""XPO: online DPO that explores, away from what the reference would have said."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.online_dpo import OnlineDPO
from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.dpo import Pairs
from alignment.losses.online import xpo
from alignment.losses.reduce import sequence_logprobs


class XPO(OnlineDPO):
    """XPO (2405.21046) algorithm 1: one sample of the policy, one of the reference; the reward says which is chosen.

    To the pair's loss comes alpha * log p(the reference's sample), whichever won: optimism moves mass off it.
    """

    reference_sample: ClassVar[bool] = True
    # A server has the policy's weights alone, and no reference but the base.
    samples_in_process: ClassVar[bool] = True

    def __init__(self, *passed: Any, alpha: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.alpha = alpha
        if self.group_size != 2:
            raise UserError(
                "algorithm.group_size: a pair is one sample of the policy and one of the reference, "
                f"{self.group_size} is no pair: type algorithm.group_size=2"
            )

    def pair_losses(self, pairs: Pairs, logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.from_reference is not None
        sums = sequence_logprobs(logprobs, batch.loss_mask)
        of_reference = torch.where(batch.from_reference, sums, 0.0).view(-1, 2).sum(1)
        values, stats = xpo(pairs, of_reference, loss=self.pair_loss, alpha=self.alpha)
        return values, stats | {"win_rate": (~batch.from_reference[::2]).float()}
