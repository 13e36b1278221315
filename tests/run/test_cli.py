"""The command itself: how fast it answers, and that an answer imports nothing heavy."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HEAVY = {"torch", "lightning", "transformers", "datasets", "peft", "pandas", "numpy", "matplotlib"}
# Runs run.main and reports the exit code, what was imported of HEAVY, and the CPU seconds it took.
PROBE = f"""
import sys, time
import run
code = run.main(sys.argv[1:])
print("PROBE", code, sorted({HEAVY!r} & set(sys.modules)), time.process_time())
"""


def probe(*argv: str) -> tuple[int, str, float, str]:
    """Exit code, heavy modules, CPU seconds (the machine may be shared) and everything that was printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    *_, line = (line for line in done.stdout.splitlines() if line.startswith("PROBE"))
    _, code, rest = line.split(" ", 2)
    heavy, _, seconds = rest.rpartition(" ")
    return int(code), heavy, float(seconds), done.stdout + done.stderr


def test_help_answers_at_once() -> None:
    code, heavy, seconds, text = probe("--help")
    assert (code, heavy) == (0, "[]")
    assert seconds < 2
    assert "python run.py" in text


def test_the_config_is_shown_at_once() -> None:
    code, heavy, seconds, text = probe("--cfg", "job", "--resolve", "algorithm=dpo", "algorithm.beta=0.25")
    assert (code, heavy) == (0, "[]")
    assert seconds < 2
    assert "  beta: 0.25\n" in text


def test_hydras_own_help_works(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = command("--hydra-help")
    assert done.returncode == 0
    assert "== Flags ==" in done.stdout


def test_a_refusal_comes_at_once_with_every_problem() -> None:
    argv = ["algorithm.betta=0.1", "algorithm=grpo", "algorithm.group_size=1", "ref_strategy=none"]
    code, heavy, seconds, text = probe(*argv)
    assert (code, heavy) == (2, "[]")
    assert seconds < 3
    for key in ("algorithm.betta: ", "algorithm.group_size: ", "ref_strategy: "):
        assert f"\n  - {key}" in text
    assert "Traceback" not in text


def test_the_exit_code_reaches_the_shell(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = command("algorithm=dpoo")
    assert done.returncode == 2
    assert "type algorithm=dpo" in done.stderr


def test_an_unexpected_error_shows_where_it_was(
    toy: list[str], tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = command(*toy, "seed=2", "output_dir=out")
    assert done.returncode == 1
    assert (tmp_path / "out" / "error.txt").read_text().startswith("ValueError: seed two\n")
    assert "toy_task.py" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: seed two\nis odd")


def test_a_signal_ends_with_130_and_how_to_go_on(toy: list[str], tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "run.py"), *toy, "seed=10", "output_dir=out"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out" / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted before the first checkpoint" in text
    assert "Traceback" not in text


def test_two_runs_started_together_do_not_share_a_folder(toy: list[str], tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "run.py"), *toy, "seed=1"]
    processes = [subprocess.Popen(words, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("outputs/*/*/config.yaml"))) == 2
    together = [subprocess.Popen([*words, "output_dir=one"], stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = sorted(process.wait(timeout=60) for process in together)
    assert codes[0] == 0
    assert codes[1] in (1, 2)


LIGHTNING_TASK = """
import os
from pathlib import Path
import lightning as L
import torch


class Model(L.LightningModule):
    def __init__(self, seed):
        super().__init__()
        self.seed, self.layer = seed, torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if self.seed == 2 and self.global_rank == 1:
            raise ValueError("rank 1 is unlucky")
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(cfg, word="none"):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False,
                        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Model(cfg["seed"]), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    folder = Path(cfg["output_dir"])
    (folder / f"trained{trainer.global_rank}of{trainer.world_size}").write_text(str(os.getpid()))
    return trainer.global_rank
"""


@pytest.mark.slow
def test_two_ranks_in_a_sweep_train_each_job_once(
    toy: list[str], tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Replaying the sweep's own command in rank 1 would start the whole sweep again, in folders of its own."""
    (tmp_path / "toy_task.py").write_text(LIGHTNING_TASK)
    argv = ["-m", "seed=1,2,3", "trainer.devices=2", "algorithm.microbatch_size=8"]
    done = command(*toy, *argv, timeout=300)
    assert done.returncode == 1, done.stderr
    folders = sorted(tmp_path.glob("multirun/*/*/*/"))
    assert [folder.name for folder in folders] == ["0", "1", "2"]
    for folder in (folders[0], folders[2]):
        pids = {name: (folder / name).read_text() for name in ("trained0of2", "trained1of2")}
        assert len(set(pids.values())) == 2
    assert "rank 1 is unlucky" in done.stderr
    assert "1 of 3 jobs failed" in done.stderr
    assert "  1: ValueError: rank 1 is unlucky" in done.stderr
    assert [folder.name for folder in folders if (folder / "objective.json").exists()] == ["0", "2"]
