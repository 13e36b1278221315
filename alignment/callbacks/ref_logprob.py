"""Fill `batch.ref_logprobs`. The same hooks serve offline pairs, online rollouts and evaluation."""

from typing import Any

import lightning as L

from alignment.batch import Batch


class RefLogprobCallback(L.Callback):
    """Asks the reference for log-probs where a batch lacks them; a loss never knows where they came from.

    Batches with a loss get them if the loss needs them; sampled ones in evaluation whenever there is a reference, since
    the KL to it is reported for every algorithm.
    """

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if module.needs_reference:
            module.reference.prepare(module, trainer.datamodule)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if module.needs_reference:
            module.reference.prepare(module, trainer.datamodule)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        if module.needs_reference and batch.ref_logprobs is None:
            batch.ref_logprobs = module.reference_logprobs(batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if module.needs_reference and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            module.reference.after_step(module.policy, trainer.global_step)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        wanted = module.reference.provides_reference if batch.texts else module.needs_reference
        if wanted and batch.ref_logprobs is None:
            batch.ref_logprobs = module.reference_logprobs(batch)
