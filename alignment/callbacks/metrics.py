"""Writes one row of metrics per logged optimizer step."""

from typing import Any

import lightning as L


class MetricsCallback(L.Callback):
    """Asks the module for its row at the end of a step.

    A callback and not a hook of the module, because checkpoints are written between the two: a row must be on disk
    before the checkpoint that a resumed run takes as its past.
    """

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        last = trainer.global_step == module.total_steps
        if at_step and (last or trainer.global_step % trainer.log_every_n_steps == 0):
            module.log_step()
