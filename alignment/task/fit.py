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
from alignment.config import external_problems, write_config
from alignment.errors import UserError
from alignment.experiment.curves import draw_curves
from alignment.experiment.record import MetricsFile, write_manifest, write_summary
from alignment.experiment.tracker import build_loggers, close_loggers
from alignment.task.assemble import Assembly, assemble, assembly_problems
from alignment.task.data_report import write_data_report

log = logging.getLogger("alignment")


def run(cfg: dict[str, Any]) -> dict[str, Any]:
    """Train as configured; returns the final metrics, which are also in summary.json."""
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
        summary = learn(assembly, folder, checkpoint) | {"output_dir": str(folder)}
        finish(assembly, folder, summary)
        failed = False
    finally:
        close_loggers(loggers, failed=failed)
    return summary


def problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said against a config that composes, before it starts."""
    return external_problems(cfg) or assembly_problems(cfg)


def quiet_libraries() -> None:
    """Notes of the libraries underneath about things that are meant to be so here."""
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*in eval mode at the start.*",
        ".*number of training batches.*",
        ".*LeafSpec.*",
        ".*exists and is not empty.*",
        ".*across ranks is zero.*",  # nothing is held out: the data report says so
        ".*ended before the epoch ended.*",  # the stream of batches goes on at the step by itself
        ".*torch.jit.*",
        ".*sync_dist.*",  # the values are sums over all ranks already
    ):
        warnings.filterwarnings("ignore", message)


def record_start(cfg: dict[str, Any], assembly: Assembly, folder: Path, checkpoint: Path | None) -> None:
    """manifest.json; on resume, forget what was written after the checkpoint. One process does it."""
    done = assembly.module.start_step = int(checkpoint.stem) if checkpoint else 0
    total = assembly.module.total_steps
    if done > total:
        raise UserError(
            f"algorithm.num_epochs: it means {total} steps, and this run has made {done}: type a larger one"
        )
    if not assembly.trainer.is_global_zero:
        return
    if assembly.module.reference.moves and (every := cfg["ref_strategy"]["every"]) > total:
        log.warning(
            "the reference never follows the policy: first at step %d, and the run has %d: type ref_strategy.every=%d",
            every,
            total,
            max(1, total // 4),
        )
    if checkpoint is not None:
        write_config(cfg, replace=True)
    write_manifest(folder, seed=cfg["seed"], data=assembly.fingerprints)
    if checkpoint is None:
        write_data_report(assembly.sets, assembly.data.reports, assembly.module.source.tokenizer, folder)
    MetricsFile(folder).truncate_after(assembly.module.start_step)
    assembly.samples.truncate_after(assembly.module.start_step)


def learn(assembly: Assembly, folder: Path, checkpoint: Path | None) -> dict[str, float]:
    """Evaluate, fit, evaluate; returns the last metrics, and the first evaluation's as `before/...`."""
    module, data, trainer = assembly.module, assembly.data, assembly.trainer
    started = time.perf_counter()
    if module.start_step == 0 or module.start_step % assembly.evaluate_every == 0:
        evaluate_once(assembly, folder, checkpoint)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= evaluate_once(assembly, folder, None)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics |= {"steps": trainer.global_step, "seconds": time.perf_counter() - started, "peak_rss_gib": usage / 2**20}
    if torch.cuda.is_available():
        metrics["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    metrics |= module.reference.report
    return {name.replace("val/", "before/"): value for name, value in evaluated(folder, 0).items()} | metrics


def evaluate_once(assembly: Assembly, folder: Path, checkpoint: Path | None) -> dict[str, float]:
    """The held-out metrics of this step: measured now, unless they are in metrics.csv already."""
    module, data, trainer = assembly.module, assembly.data, assembly.trainer
    found = evaluated(folder, module.step)
    if data.val_sets and not trainer.strategy.broadcast(found):
        trainer.validate(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
        found = evaluated(folder, module.step)
    return found


def evaluated(folder: Path, step: int) -> dict[str, float]:
    """The held-out metrics of a step, from metrics.csv."""
    rows = [row for row in MetricsFile(folder).read() if row["step"] == step and row["phase"] == "val"]
    return {name: value for row in rows for name, value in row.items() if name.startswith("val/") and value is not None}


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
