"""`task=fit`: evaluate, learn, evaluate, save `model/`."""

from __future__ import annotations

import logging
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers

from alignment.callbacks.checkpoint import last_checkpoint
from alignment.config import check_external
from alignment.experiment.curves import draw_curves
from alignment.experiment.record import MetricsFile, write_manifest, write_summary
from alignment.experiment.tracker import build_loggers, close_loggers
from alignment.task.assemble import Assembly, assemble

log = logging.getLogger("alignment")


def run(cfg: dict[str, Any]) -> dict[str, float]:
    """Train as configured; returns the final metrics, which are also in summary.json."""
    check_external(cfg)
    quiet_libraries()
    folder = Path(cfg["output_dir"])
    L.seed_everything(cfg["seed"], verbose=False)
    checkpoint = last_checkpoint(folder / "checkpoints") if cfg["resume"] else None
    if checkpoint is not None:
        log.info("going on from %s", checkpoint)
    loggers, failed = build_loggers(cfg["logger"], folder), True
    try:
        assembly = assemble(cfg, loggers)
        record_start(cfg, assembly, folder, checkpoint)
        summary = learn(assembly, checkpoint) | {"output_dir": str(folder)}
        finish(assembly, folder, summary)
        failed = False
    finally:
        close_loggers(loggers, failed=failed)
    return summary


def quiet_libraries() -> None:
    """Notes of the libraries underneath about things that are meant to be so here."""
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*modules in eval mode.*",
        ".*number of training batches.*",
        ".*LeafSpec.*",
        ".*exists and is not empty.*",
        ".*mid-epoch.*",
        ".*torch.jit.*",
    ):
        warnings.filterwarnings("ignore", message)


def record_start(cfg: dict[str, Any], assembly: Assembly, folder: Path, checkpoint: Path | None) -> None:
    """manifest.json; on resume, forget what was written after the checkpoint. One process does it."""
    if not assembly.trainer.is_global_zero:
        return
    write_manifest(folder, seed=cfg["seed"], data=assembly.fingerprints)
    step = int(checkpoint.stem) if checkpoint else 0
    MetricsFile(folder).truncate_after(step)
    assembly.samples.truncate_after(step)


def learn(assembly: Assembly, checkpoint: Path | None) -> dict[str, float]:
    """Evaluate, fit, evaluate. Metrics before training are named `before/...`."""
    module, data, trainer = assembly.module, assembly.data, assembly.trainer
    started = time.perf_counter()
    evaluates = bool(data.val_sets)
    before: dict[str, float] = {}
    if evaluates and checkpoint is None:
        trainer.validate(module, datamodule=data, verbose=False)
        before = {name.replace("val/", "before/"): float(v) for name, v in trainer.callback_metrics.items()}
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if evaluates and module.evaluated_step != trainer.global_step:
        trainer.validate(module, datamodule=data, verbose=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics |= {"steps": trainer.global_step, "seconds": time.perf_counter() - started, "peak_rss_gib": usage / 2**20}
    if torch.cuda.is_available():
        metrics["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: value for name, value in (before | metrics).items() if name != "step"}


def finish(assembly: Assembly, folder: Path, summary: dict[str, Any]) -> None:
    """model/, summary.json and the curves, and say where they are."""
    if not assembly.trainer.is_global_zero:
        return
    module = assembly.module
    module.source.save(module.policy, folder / "model")
    write_summary(folder, summary)
    draw_curves(folder)
    for name in sorted(name for name in summary if name.startswith("before/")):
        after = name.replace("before/", "val/")
        if after in summary:
            log.info("held-out %-24s %8.4f -> %8.4f", after.removeprefix("val/"), summary[name], summary[after])
    log.info("everything is in %s", folder)
