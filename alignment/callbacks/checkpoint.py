"""Checkpoints that are either whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


def checkpoint_callback(folder: Path, *, online: bool, every: int, keep: int) -> ModelCheckpoint:
    """Saves at rollout boundaries (online) or after optimizer steps (offline): the points a run can go on from exactly."""
    when: dict[str, Any] = (
        {"every_n_epochs": every, "save_on_train_epoch_end": True} if online else {"every_n_train_steps": every}
    )
    return ModelCheckpoint(
        folder,
        filename="{step:08d}",
        monitor="step" if keep > 0 else None,
        mode="max",
        save_top_k=keep,
        save_last=False,
        auto_insert_metric_name=False,
        enable_version_counter=False,
        **when,
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, by its step."""
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem), default=None)
