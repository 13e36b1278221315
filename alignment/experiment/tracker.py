"""Where metrics go while a run is on: metrics.csv always, and Weights & Biases or TensorBoard as chosen.

Every logger gets the step from the run (optimizer steps done), so a resumed run continues each curve where its
checkpoint is: metrics.csv and TensorBoard forget what came after it, Weights & Biases, which cannot forget, is not sent
the same point twice.
"""

from __future__ import annotations

import importlib
import json
import logging
import netrc
import os
import secrets
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from alignment.errors import UserError
from alignment.experiment.record import MetricsFile

log = logging.getLogger("alignment")

EVALUATION_PHASES = ("val", "test")


class RunLogger(Logger):
    """Lightning's metrics into metrics.csv: val/... and test/... are phases of their own, all else is "train"."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.file = MetricsFile(folder)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.file.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the whole config is in config.yaml beside metrics.csv."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row per phase, on disk when this returns. Lightning's own "epoch" is left out: it counts no step."""
        if step is None:
            raise ValueError(f"metrics {sorted(metrics)} have no step")
        phases: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            prefix = name.partition("/")[0]
            if name != "epoch":
                phases.setdefault(prefix if prefix in EVALUATION_PHASES else "train", {})[name] = value
        for phase, values in phases.items():
            self.file.append(step, phase, values)


class RunWandbLogger(WandbLogger):
    """Lightning's WandbLogger for a run that may be resumed, and for several runs in one process.

    The step is a metric of its own (trainer/global_step) and the axis of all others, so nothing is dropped for coming
    "too early". `sent` is the last step of every metric that earlier starts of this run have logged: up to there a
    resumed run would only repeat itself.
    """

    def __init__(self, *, sent: Mapping[str, int], **settings: Any) -> None:
        super().__init__(**settings)
        self.sent = dict(sent)
        self._compared = not self.sent

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send what is new."""
        self._compare_with_server()
        if step is not None:
            metrics = {name: value for name, value in metrics.items() if step > self.sent.get(name, -1)}
        if metrics.keys() - {"epoch"}:
            super().log_metrics(metrics, step)

    def _compare_with_server(self) -> None:
        """A machine that died may not have sent its last points: where the server was reached, it knows better."""
        if self._compared:
            return
        self._compared = True
        if getattr(self.experiment, "resumed", False):
            reached = int(self.experiment.summary.get("trainer/global_step", -1))
            self.sent = {name: min(step, reached) for name, step in self.sent.items()}

    def finish(self, *, failed: bool) -> None:
        """End the run with its exit code, so that the next job of this process starts one of its own."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(failed))
            self._experiment = None


class RunTensorBoardLogger(TensorBoardLogger):
    """Lightning's TensorBoardLogger; a resumed run takes back the points that it is about to log again."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """The writer is made at the first point, and marks points from that step on as void."""
        if self._experiment is None and step is not None:
            self._kwargs["purge_step"] = step
        super().log_metrics(metrics, step)


# ---- building and closing ------------------------------------------------------------------------------------------
def build_loggers(chosen: Mapping[str, Mapping[str, Any]], folder: str | Path) -> list[Logger]:
    """Loggers of a run that writes into `folder`; metrics.csv is written whatever is chosen.

    chosen: name -> settings, `_target_` being the dotted path of a function or class that takes `folder` and the other
        settings and returns a Lightning logger.
    To be called before metrics.csv is truncated for a resumed run, and matched by `close_loggers` in a `finally`.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    loggers = [_build(settings, folder) for settings in chosen.values()]
    if not any(isinstance(logger, RunLogger) for logger in loggers):
        loggers.insert(0, RunLogger(folder))
    return loggers


def close_loggers(loggers: Sequence[Logger], *, failed: bool) -> None:
    """End every logger with the outcome of the run. A logger that cannot be closed is reported, and hides no error."""
    for logger in loggers:
        try:
            logger.finalize("failed" if failed else "success")
            if isinstance(logger, RunWandbLogger):
                logger.finish(failed=failed)
        except Exception as error:  # the network, a full disk: the run's own outcome matters more
            log.warning("%s could not be closed: %s", type(logger).__name__, error)


def _build(settings: Mapping[str, Any], folder: str | Path) -> Logger:
    module, _, name = settings["_target_"].rpartition(".")
    make: Callable[..., Logger] = getattr(importlib.import_module(module), name)
    return make(folder=folder, **{key: value for key, value in settings.items() if not key.startswith("_")})


def csv_logger(*, folder: str | Path) -> RunLogger:
    """metrics.csv in the run's folder."""
    return RunLogger(folder)


def tensorboard_logger(*, folder: str | Path, flush_seconds: int) -> RunTensorBoardLogger:
    """Event files in <folder>/tensorboard."""
    return RunTensorBoardLogger(str(folder), name="", version="tensorboard", flush_secs=flush_seconds)


def wandb_logger(
    *,
    folder: str | Path,
    project: str,
    entity: str | None,
    name: str | None,
    group: str | None,
    tags: list[str],
    notes: str | None,
    offline: bool | None,
) -> RunWandbLogger:
    """Weights & Biases, with its own files in <folder>/wandb. Nothing is sent where there is no key, and it says so.

    offline: True keeps the run on this machine, False sends it, None sends it if there is a key.
    Raises UserError where a key is missing that was asked for, or where another run of this process is still open.
    """
    import wandb

    folder = Path(folder)
    if wandb.run is not None:
        raise UserError(f"the wandb run {wandb.run.id} of an earlier job is still open: call wandb.finish() first")
    run_id, sent = remembered(folder)
    return RunWandbLogger(
        sent=sent,
        project=project,
        entity=entity,
        name=name,
        group=group,
        tags=tags,
        notes=notes,
        save_dir=str(folder),
        id=run_id,
        resume="allow",
        mode=wandb_mode(offline, folder),
    )


def wandb_mode(offline: bool | None, folder: Path) -> str:
    """ "online" or "offline" (or "disabled", where WANDB_MODE says so); logs why and how to send the run later."""
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted == "disabled":
        return wanted
    if offline is None and not wanted.startswith(("offline", "dryrun")):
        if has_wandb_key():
            return "online"
        log.info(
            "wandb: no key in WANDB_API_KEY or netrc, so the run stays on this machine. Send it later: wandb login, "
            "then wandb sync %s",
            folder / "wandb" / "offline-run-*",
        )
        return "offline"
    if offline is False:
        if not has_wandb_key():
            raise UserError("logger.wandb.offline=false needs a key: type wandb login, or leave it null")
        return "online"
    return "offline"


def has_wandb_key() -> bool:
    """Whether wandb would find a key where it looks: the environment, or netrc for the server's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in paths):
        try:
            if path.is_file() and netrc.netrc(path).authenticators(host):
                return True
        except netrc.NetrcParseError as error:
            log.warning("wandb: %s cannot be read: %s", path, error)
    return False


def remembered(folder: Path) -> tuple[str, dict[str, int]]:
    """The run's id and, per metric, the last step logged before now: the same id after a resume. Kept in wandb.json.

    The steps are read off metrics.csv, and kept because a resume cuts that file back to its checkpoint.
    """
    path = folder / "wandb.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sent": {}}
    # A sweep's agent has chosen the id under which it waits for the run.
    run_id = known.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    sent: dict[str, int] = dict(known["sent"])
    for row in MetricsFile(folder).read():
        for name in row.keys() - {"step", "phase"}:
            sent[name] = max(row["step"], sent.get(name, -1))
    if rank_zero_only.rank == 0:
        path.write_text(json.dumps({"id": run_id, "sent": sent}))
    return run_id, sent
