"""Checkpoints that are either whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO


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
    """

    def __init__(self, folder: Path, *, online: bool, every: int, keep: int) -> None:
        self.folder, self.online, self.every, self.keep = folder, online, every, keep

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        due = trainer.global_step % self.every == 0 or trainer.global_step == module.total_steps
        if not self.online and at_step and due:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        due = (trainer.current_epoch + 1) % self.every == 0 or trainer.global_step == module.total_steps
        if self.online and due:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step:08d}.ckpt")
        if trainer.is_global_zero and self.keep > 0:
            for old in checkpoints(self.folder)[: -self.keep]:
                old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one, or None."""
    return next(reversed(checkpoints(folder)), None)
