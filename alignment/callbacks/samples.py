"""Keeps completions: every logged step's in samples.jsonl, a few in the terminal."""

from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from alignment.batch import Batch


class SamplesCallback(L.Callback):
    """Writes what was sampled, with its rewards, and shows `num_shown` completions of each evaluation."""

    def __init__(self, samples, *, num_shown: int = 4) -> None:
        self.samples, self.num_shown = samples, num_shown

    def on_train_batch_end(self, trainer: Any, module: Any, outputs, batch: Batch, batch_idx: int) -> None:
        if module.online and batch_idx == 0 and trainer.is_global_zero:
            step = (trainer.current_epoch + 1) * module.steps_per_rollout
            self.samples.append(records(trainer.datamodule.rollouts.sampled, phase="rollout", step=step))

    def on_validation_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not batch.texts or not trainer.is_global_zero or trainer.sanity_checking:
            return
        self.samples.append(records(batch, phase="val", step=module.step))
        if batch_idx == 0 and self.num_shown:
            show(batch, self.num_shown, title=f"held-out samples at step {module.step}")


def records(batch: Batch, *, phase: str, step: int) -> list[dict]:
    """One plain dict per completion."""
    assert batch.rewards is not None
    rows = []
    for n, text in enumerate(batch.texts):
        columns = batch.examples[n // batch.group_size].columns
        row = {"step": step, "phase": phase, "prompt": columns.get("prompt"), "answer": columns.get("answer")}
        row |= {"completion": text, "reward": _number(batch.rewards[n])}
        row |= {"parts": {name: _number(values[n]) for name, values in batch.parts.items()}}
        if batch.advantages is not None:
            row["advantage"] = float(batch.advantages[n].mean())
        rows.append(row)
    return rows


def _number(value) -> float | None:
    """None for unscorable: JSON has no NaN."""
    return None if value != value else float(value)


def show(batch: Batch, count: int, *, title: str) -> None:
    """A table of prompt, completion and reward in the terminal."""
    table = Table(title=title, title_justify="left")
    for header in ("prompt", "completion", "reward"):
        table.add_column(header, overflow="fold")
    stride = max(1, len(batch.texts) // count)
    for row in records(batch, phase="", step=0)[::stride][:count]:
        prompt = row["prompt"]
        last = prompt[-1]["content"] if isinstance(prompt, list) else str(prompt)
        reward = "-" if row["reward"] is None else f"{row['reward']:.2f}"
        table.add_row(last[-300:], row["completion"][:300], reward)
    Console().print(table)
