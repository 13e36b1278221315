"""One bar for the whole run: loss, reward, KL, tokens per second and time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

SHOWN = {
    "train/loss": "loss",
    "rollout/reward": "reward",
    "train/kl": "kl",
    "rewards/accuracies": "pair acc",
    "val/accuracy": "held-out acc",
}


class RunProgress(ProgressBar):
    """Counts optimizer steps, not Lightning's epochs: one rollout is one epoch here, and nobody wants a bar for each.

    Without a terminal it prints a plain line now and then instead of redrawing.
    """

    def __init__(self, total_steps: int) -> None:
        super().__init__()
        self.total_steps = total_steps
        self.bar: tqdm | None = None
        self._shown: dict[str, str] = {}
        self._interactive, self._wanted = sys.stderr.isatty(), True
        self._tokens, self._started, self._line_at = 0.0, 0.0, 0.0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._started = time.perf_counter()
        if self._wanted:
            self.bar = tqdm(
                total=self.total_steps,
                initial=trainer.global_step,
                desc="step",
                dynamic_ncols=True,
                disable=not self._interactive,
                smoothing=0.1,
            )
            self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._tokens += float(batch.prompt_mask.sum() + batch.completion_mask.sum()) * trainer.world_size
        if self.bar is None:
            return
        self._remember(trainer)
        if trainer.global_step > self.bar.n:
            self.bar.update(trainer.global_step - self.bar.n)
            self.bar.n = trainer.global_step
            self._show(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._remember(trainer)
        if self.bar is not None:
            self._show(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.bar is not None:
            self._remember(trainer)
            self._show(trainer)
            self.bar.close()
            self.bar = None

    def enable(self) -> None:
        self._wanted = True

    def disable(self) -> None:
        """Lightning's call on every process but the first."""
        self._wanted = False

    def _remember(self, trainer: Any) -> None:
        for name, label in SHOWN.items():
            if name in trainer.callback_metrics:
                self._shown[label] = f"{float(trainer.callback_metrics[name]):.3g}"

    def _show(self, trainer: Any) -> None:
        assert self.bar is not None
        seconds = time.perf_counter() - self._started
        shown = self._shown | {"tok/s": f"{self._tokens / max(seconds, 1e-9):,.0f}"}
        if self._interactive:
            self.bar.set_postfix(shown)
        elif time.perf_counter() - self._line_at > 5 or trainer.global_step >= self.total_steps:
            self._line_at = time.perf_counter()
            done = max(trainer.global_step - self._first_step, 1)
            left = tqdm.format_interval(int(seconds / done * (self.total_steps - trainer.global_step)))
            text = "  ".join(f"{label} {value}" for label, value in shown.items())
            print(f"step {trainer.global_step}/{self.total_steps}  {text}  left {left}", file=sys.stderr, flush=True)
