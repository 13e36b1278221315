"""Checkpoints that are either whole or not there."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

log = logging.getLogger("alignment")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames: a process killed while it writes leaves the former checkpoint intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)


class BoundaryCheckpoint(Checkpoint):
    """Saves where a run can go on from exactly: after a rollout (online), an optimizer step (offline), and at the end.

    Lightning runs checkpoint callbacks after all others, so what they did to the step is in the file.

    SIGTERM, with which a scheduler announces that it will take the machine, ends the run at the next such place, after
    a checkpoint, with exit code 143 on every rank. Lightning would end within a rollout, without one, with code 0.
    """

    def __init__(self, folder: Path, *, online: bool, every: int, keep: int) -> None:
        self.folder, self.online, self.every, self.keep = folder, online, every, keep
        self.told_to_end = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        _handle(lambda *_: setattr(self, "told_to_end", True))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # before and after training there is nothing to save
            _handle(signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.online and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._at_boundary(trainer, module, trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.online:
            self._at_boundary(trainer, module, trainer.current_epoch + 1)

    def _at_boundary(self, trainer: Any, module: Any, number: int) -> None:
        ends = trainer.strategy.reduce_boolean_decision(self.told_to_end, all=False)
        if ends or number % self.every == 0 or trainer.global_step == module.total_steps:
            self._save(trainer)
        if ends:
            log.warning(
                "told to end (SIGTERM): saved at step %d; go on with python run.py resume=%s",
                trainer.global_step,
                self.folder.parent,
            )
            raise SystemExit(128 + signal.SIGTERM)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step:08d}.ckpt")
        if trainer.is_global_zero and self.keep > 0:
            for old in checkpoints(self.folder)[: -self.keep]:
                old.unlink()


def _handle(handler: Any) -> None:
    """Of SIGTERM, until Lightning puts the former handler back. Handlers belong to the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one, or None."""
    return next(reversed(checkpoints(folder)), None)
