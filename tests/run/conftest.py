"""A task that needs no model: what `run.py` does around a task, in milliseconds."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

TASK = '''
import json, os, signal, sys, time
from pathlib import Path
from alignment.errors import UserError


def run(cfg, word="none"):
    """Leaves what it saw in the run's folder, then ends as its seed says."""
    folder, seed = Path(cfg["output_dir"]), cfg["seed"]
    rank = os.environ.get("LOCAL_RANK", "0")
    seen = {"argv": sys.argv, "cwd": os.getcwd(), "config": (folder / "config.yaml").exists(), "word": word}
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    os.environ["LOCAL_RANK"] = "7"  # what Lightning leaves behind
    os.environ["MASTER_PORT"] = "1"
    if seed == 2:
        raise ValueError("seed two\\nis odd")
    if seed == 3:
        raise UserError("seed: 3 is not for this task: type seed=4")
    if seed == 5:
        raise KeyboardInterrupt
    if seed == 6:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)
    if seed == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 9:
        sys.exit("gone")
    if seed == 10:
        (folder / "waiting").touch()
        time.sleep(60)
    return {"score": float(seed)}
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a command line that choose the toy task; tmp_path is the folder it is started in."""
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "toy.yaml").write_text("# A toy\n_target_: toy_task.run\n# Any\nword: hello\n")
    (tmp_path / "toy_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return ["--config-dir", str(tmp_path / "conf"), "task=toy"]


@pytest.fixture
def run_py() -> Iterator[ModuleType]:
    """The entry point as a module; the handlers that Hydra gives the root logger are taken away again."""
    spec = importlib.util.spec_from_file_location("run_py", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    spec.loader.exec_module(module)
    yield module
    root.handlers, root.level = handlers, level


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python run.py ...` for real, in the current folder."""

    def call(*argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(ROOT / "run.py"), *argv]
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)

    return call
