"""Loggers: metrics.csv under a real Trainer, wandb through a fake client and offline, TensorBoard's own reader."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import wandb
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from alignment.errors import UserError
from alignment.experiment import tracker
from alignment.experiment.record import MetricsFile
from alignment.experiment.tracker import RunLogger, RunWandbLogger, build_loggers, close_loggers, wandb_mode

CONF = Path(__file__).parents[2] / "conf" / "logger"


def chosen(*names: str, **settings: Any) -> dict[str, Any]:
    """What Hydra composes of logger=[names]."""
    nodes: dict[str, Any] = {}
    for name in names:
        nodes |= yaml.safe_load((CONF / f"{name}.yaml").read_text())
    for name in settings:
        nodes[names[-1]][name] = settings[name]
    return nodes


# ---- metrics.csv ---------------------------------------------------------------------------------------------------
def test_metrics_csv_is_written_whatever_is_chosen(tmp_path: Path) -> None:
    for nodes in ({}, chosen("csv"), chosen("tensorboard"), chosen("csv", "tensorboard")):
        loggers = build_loggers(nodes, tmp_path)
        assert sum(isinstance(logger, RunLogger) for logger in loggers) == 1
        assert len(loggers) == len(nodes.keys() | {"csv"})


def test_phases_of_one_step(tmp_path: Path) -> None:
    [logger] = build_loggers({}, tmp_path)
    logger.log_metrics({"epoch": 0, "train/loss": 1.0, "rollout/reward": 0.5, "val/accuracy": 0.25}, 3)
    logger.log_metrics({"epoch": 0, "val/kl": 0.1}, 3)
    assert MetricsFile(tmp_path).read() == [
        {"step": 3, "phase": "train", "train/loss": 1.0, "rollout/reward": 0.5},
        {"step": 3, "phase": "val", "val/accuracy": 0.25, "val/kl": 0.1},
    ]
    with pytest.raises(ValueError, match=r"\['a'\] have no step"):
        logger.log_metrics({"a": 1.0})


class Counting(L.LightningModule):
    """Logs the optimizer's step as the metrics' step, as the project's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self.log_dict({"train/twice": 2.0 * self.global_step, "step": float(self.global_step)}, batch_size=1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val/thrice": 3.0 * self.global_step, "step": float(self.global_step)}, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_under_a_trainer_every_step_has_its_row(tmp_path: Path) -> None:
    data = DataLoader(torch.ones(3, 1), batch_size=1)
    loggers = build_loggers(chosen("csv"), tmp_path)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=loggers,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = Counting()
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    close_loggers(loggers, failed=False)
    assert MetricsFile(tmp_path).read() == [
        {"step": 0, "phase": "val", "val/thrice": 0.0},
        {"step": 1, "phase": "train", "train/twice": 2.0},
        {"step": 2, "phase": "train", "train/twice": 4.0},
        {"step": 3, "phase": "train", "train/twice": 6.0},
        {"step": 3, "phase": "val", "val/thrice": 9.0},
    ]


# ---- wandb ---------------------------------------------------------------------------------------------------------
class Server:
    """A wandb server in memory, with a client that drops what comes at a step that it has passed."""

    def __init__(self) -> None:
        self.histories: dict[str, list[dict]] = {}
        self.exit_codes: list[tuple[str, int]] = []
        self.settings: list[dict] = []

    def init(self, **settings: Any) -> SimpleNamespace:
        self.settings.append(settings)
        history = self.histories.setdefault(settings["id"], [])
        resumed = bool(history)
        summary: dict[str, Any] = {}
        for row in history:
            summary |= row

        def log(row: dict, step: int | None = None) -> None:
            if step is None or step > len(history):
                history.append(row)

        def finish(exit_code: int = 0) -> None:
            self.exit_codes.append((settings["id"], exit_code))
            wandb.run = None

        wandb.run = SimpleNamespace(
            id=settings["id"], log=log, finish=finish, resumed=resumed, summary=summary, define_metric=print
        )
        return wandb.run  # pyright: ignore[reportReturnType]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(wandb, "init", server.init)
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return server


def start(folder: Path, **settings: Any) -> list:
    return build_loggers(chosen("csv", "wandb", **settings), folder)


def log(loggers: list, steps: range, offset: float = 0.0) -> None:
    for step in steps:
        for logger in loggers:
            logger.log_metrics({"train/loss": step + offset}, step)
            if step % 2 == 0:
                logger.log_metrics({"val/accuracy": step + offset}, step)


def test_a_resumed_run_has_every_point_once_under_one_id(tmp_path: Path, server: Server) -> None:
    loggers = start(tmp_path)
    log(loggers, range(1, 8))
    close_loggers(loggers, failed=True)
    loggers = start(tmp_path)
    MetricsFile(tmp_path).truncate_after(5)  # the checkpoint
    log(loggers, range(6, 11))
    close_loggers(loggers, failed=False)
    [history] = server.histories.values()
    steps = [row["trainer/global_step"] for row in history if "train/loss" in row]
    assert steps == list(range(1, 11))
    assert [row["trainer/global_step"] for row in history if "val/accuracy" in row] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in MetricsFile(tmp_path).read() if row["phase"] == "train"] == list(range(1, 11))


def test_resumed_twice_from_the_same_checkpoint(tmp_path: Path, server: Server) -> None:
    """The second resume no longer finds in metrics.csv what the first start has sent."""
    loggers = start(tmp_path)
    log(loggers, range(1, 8))
    close_loggers(loggers, failed=True)
    loggers = start(tmp_path)
    MetricsFile(tmp_path).truncate_after(5)
    close_loggers(loggers, failed=True)
    loggers = start(tmp_path)
    log(loggers, range(6, 9))
    close_loggers(loggers, failed=False)
    [history] = server.histories.values()
    assert [row["trainer/global_step"] for row in history if "train/loss" in row] == list(range(1, 9))


def test_points_that_never_reached_the_server_are_sent_again(tmp_path: Path, server: Server) -> None:
    loggers = start(tmp_path)
    log(loggers, range(1, 8))
    close_loggers(loggers, failed=True)
    [history] = server.histories.values()
    history[:] = [row for row in history if row["trainer/global_step"] <= 6]
    loggers = start(tmp_path)
    log(loggers, range(6, 9))
    close_loggers(loggers, failed=False)
    assert [row["trainer/global_step"] for row in history if "train/loss" in row] == list(range(1, 9))
    assert [row["trainer/global_step"] for row in history if "val/accuracy" in row] == [2, 4, 6, 8]


def test_two_jobs_of_one_process_are_two_runs_with_their_exit_codes(tmp_path: Path, server: Server) -> None:
    for job in range(2):
        loggers = start(tmp_path / str(job))
        log(loggers, range(1, 3), offset=100.0 * job)
        close_loggers(loggers, failed=job == 1)
    assert [code for _, code in server.exit_codes] == [0, 1]
    first, second = server.histories.values()
    assert {row["train/loss"] for row in first if "train/loss" in row} == {1.0, 2.0}
    assert {row["train/loss"] for row in second if "train/loss" in row} == {101.0, 102.0}


def test_a_run_that_was_left_open_is_not_logged_into(tmp_path: Path, server: Server) -> None:
    log(start(tmp_path / "0"), range(1, 2))
    with pytest.raises(UserError, match=r"still open: call wandb\.finish"):
        start(tmp_path / "1")


def test_a_logger_that_logged_nothing_is_no_run(tmp_path: Path, server: Server) -> None:
    close_loggers(start(tmp_path), failed=True)
    assert server.exit_codes == []


def test_settings_reach_wandb(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    loggers = start(tmp_path, project="p", name="n", group="g", tags=["t"], offline=True)
    log(loggers, range(1, 2))
    [settings] = server.settings
    expected = {"project": "p", "name": "n", "group": "g", "tags": ["t"], "mode": "offline", "id": "of-the-agent"}
    expected |= {"resume": "allow", "dir": str(tmp_path)}
    assert {key: settings[key] for key in expected} == expected


def test_closing_goes_on_after_a_logger_that_fails(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = start(tmp_path)
    log(loggers, range(1, 2))

    def broken(status: str) -> None:
        raise OSError("disk full")

    loggers[0].finalize = broken
    with caplog.at_level(logging.WARNING, logger="alignment"):
        close_loggers(loggers, failed=True)
    assert "RunLogger could not be closed: disk full" in caplog.text
    assert [code for _, code in server.exit_codes] == [1]


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a key, and no wandb settings; returns the netrc that would be read."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_without_a_key_a_run_stays_here_and_says_so(no_key: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="alignment"):
        assert wandb_mode(None, Path("outputs/x")) == "offline"
    assert "no key in WANDB_API_KEY or netrc" in caplog.text
    assert "wandb sync outputs/x/wandb/offline-run-*" in caplog.text
    with pytest.raises(UserError, match="offline=false needs a key"):
        wandb_mode(False, Path())


def test_with_a_key_it_is_sent_unless_asked_otherwise(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_key.write_text("machine other.host login user password k\n")
    assert wandb_mode(None, Path()) == "offline"
    no_key.write_text("machine api.wandb.ai login user password k\n")
    assert wandb_mode(None, Path()) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:8080")
    assert wandb_mode(None, Path()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_mode(None, Path()) == "online"
    assert wandb_mode(True, Path()) == "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(None, Path()) == "offline"
    assert wandb_mode(False, Path()) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(False, Path()) == "disabled"


def test_a_broken_netrc_is_no_key_and_no_crash(no_key: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_key.write_text("nonsense here\n")
    assert not tracker.has_wandb_key()
    assert "cannot be read" in caplog.text


def test_a_real_run_offline(tmp_path: Path) -> None:
    environment = dict(os.environ)
    ids = []
    for job in range(2):
        folder = tmp_path / str(job)
        loggers = build_loggers(chosen("wandb", offline=True), folder)
        log(loggers, range(1, 4))
        [logger] = [logger for logger in loggers if isinstance(logger, RunWandbLogger)]
        ids.append(logger.experiment.id)
        close_loggers(loggers, failed=False)
        assert wandb.run is None
        assert json.loads((folder / "wandb.json").read_text())["id"] == ids[-1]
        assert list((folder / "wandb").glob(f"offline-run-*-{ids[-1]}"))
    assert ids[0] != ids[1]
    assert os.environ.get("WANDB_MODE") == environment.get("WANDB_MODE")  # one job decides nothing for the next


# ---- TensorBoard ---------------------------------------------------------------------------------------------------
def test_tensorboard_takes_back_what_a_resumed_run_logs_again(tmp_path: Path) -> None:
    for steps, offset in ((range(1, 8), 0.0), (range(6, 11), 100.0)):
        loggers = build_loggers(chosen("tensorboard"), tmp_path)
        log(loggers, steps, offset)
        close_loggers(loggers, failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(step, float(step)) for step in range(1, 6)] + [(step, step + 100.0) for step in range(6, 11)]
