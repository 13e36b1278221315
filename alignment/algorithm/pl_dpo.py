"""Plackett-Luce DPO: learn from the whole order of ranked answers, against a reference."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithm.pairs import PreferenceModule
from alignment.batch import Batch
from alignment.losses.dpo import Pairs
from alignment.losses.plackett_luce import ranked_dpo, ranking_stats
from alignment.losses.reduce import sequence_logprobs


class PLDPO(PreferenceModule):
    """DPO of the Plackett-Luce model (2305.18290 App. A.3). Lists of two are DPO's own loss.

    Metrics call the best answer of a list chosen and the worst rejected; top1_accuracy and pair_accuracy are of the
    whole order.
    """

    data_form: ClassVar[str] = "ranked"
    reference_need: ClassVar[str] = "required"

    def __init__(self, *passed: Any, beta: float, **common: Any) -> None:
        super().__init__(*passed, **common)
        self.beta = beta

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logprobs, reference = self.scores(batch).logprobs, batch.ref_logprobs
        assert reference is not None
        mask, size = batch.loss_mask, batch.group_size
        policy, reference = (sequence_logprobs(x, mask).view(-1, size) for x in (logprobs, reference))
        every = torch.ones_like(policy, dtype=torch.bool)
        loss = self.example_mean(ranked_dpo(policy, reference, every, beta=self.beta), batch)
        self.log_loss(loss, batch, batch.step_examples)
        self.log_stats(ranking_stats(self.beta * (policy - reference), every))
        lengths = mask.sum(-1).to(policy.dtype).view(-1, size)
        ends = [x[:, end] for x in (policy, reference, lengths) for end in (0, -1)]
        self.log_pairs(Pairs(*ends))
        return loss
