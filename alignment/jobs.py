"""Run the task of one validated config: in this process, or in one of its own. Knows nothing of Hydra."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from alignment.errors import Interrupted, UserError

ENTRY = Path(__file__).resolve().parent.parent / "run.py"
# Lightning sets these when it starts further ranks and leaves them behind; a next job would take itself for a rank.
RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")


def is_first_process() -> bool:
    """Whether this process is rank 0 of its job, as far as the launcher's variables say."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def is_launched_from_outside() -> bool:
    """Whether torchrun or srun started several processes with this very command."""
    torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    srun = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ
    return torchrun or (srun and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"))


def task_of(cfg: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = cfg["task"]["_target_"].rpartition(".")
    return getattr(_imported(module), name)


def rehearse(cfg: dict[str, Any]) -> list[str]:
    """What the task says against the config before it starts: its module's `problems(cfg)`, if it has one."""
    problems = getattr(_imported(cfg["task"]["_target_"].rpartition(".")[0]), "problems", None)
    return list(problems(cfg)) if problems else []


def _imported(module: str) -> ModuleType:
    _go_offline_without_network()
    for name in ("bitsandbytes", "matplotlib"):  # what they say while they are imported is no news to anybody
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module(module)


def _go_offline_without_network() -> None:
    """Where the hub's name cannot be looked up, its libraries would try for 40 seconds what they cannot do: let them
    take what is cached, or say at once that it is not there. A proxy may know the name, so with one nothing is done."""
    proxies = {name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
    if proxies or "HF_HUB_OFFLINE" in os.environ:
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def run_here(cfg: dict[str, Any]) -> Any:
    """Call the task in this process; further ranks that Lightning starts run `run.py --job <folder>/config.yaml`."""
    folder = Path(cfg["output_dir"])
    keys = {name: value for name, value in cfg["task"].items() if name != "_target_"}
    try:
        with _launched_as("--job", str(folder / "config.yaml")), _own_environment():
            return task_of(cfg)(cfg, **keys)
    except KeyboardInterrupt:
        raise Interrupted(folder) from None
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            raise Interrupted(folder) from None
        raise
    except UserError as error:
        error.debug = bool(cfg["debug"])
        raise


def run_apart(cfg: dict[str, Any]) -> Any:
    """Run the task in a process of its own: when one of several ranks dies, Lightning kills the process that started
    them, and a sweep must outlive that."""
    folder = Path(cfg["output_dir"])
    code = subprocess.run([sys.executable, str(ENTRY), "--job", str(folder / "config.yaml")]).returncode
    if code == 130:
        raise Interrupted(folder)
    if code:
        raise UserError(f"the job's process ended with code {code}; what it said is above")
    return json.loads((folder / "objective.json").read_text(encoding="utf-8"))


def run_saved(cfg: dict[str, Any]) -> Any:
    """The other side of both: a config that is already resolved and checked.

    Rank 0 leaves its result in the folder; the rank that failed first leaves the reason, since rank 0 will be killed.
    """
    folder = Path(cfg["output_dir"])
    try:
        objective = run_here(cfg)
    except Exception as error:
        record_failure(folder, error)
        raise
    if is_first_process():
        (folder / "objective.json").write_text(json.dumps(objective, default=str), encoding="utf-8")
    return objective


def record_failure(folder: Path, error: BaseException) -> None:
    """`error.txt`: what it was in the first line, then the traceback. An earlier, closer record is kept."""
    with contextlib.suppress(FileExistsError), open(folder / "error.txt", "x", encoding="utf-8") as file:
        first = " ".join(str(error).split("\n", 1)[0].split())
        file.write(f"{type(error).__name__}: {first}\n\n{''.join(traceback.format_exception(error))}")


@contextlib.contextmanager
def _launched_as(*arguments: str) -> Iterator[None]:
    """What Lightning replays to start another rank: this job alone, not the sweep it may be part of."""
    main = sys.modules["__main__"]
    argv, spec = sys.argv, main.__spec__
    sys.argv, main.__spec__ = [str(ENTRY), *arguments], None
    try:
        yield
    finally:
        sys.argv, main.__spec__ = argv, spec


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Leave nothing behind for the next job of a sweep: variables, process groups, signal handlers, cached memory."""
    outer = {name: os.environ.get(name) for name in RANK_VARIABLES}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if _in_main() else {}
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if outer["LOCAL_RANK"] is None:
            if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            for name, value in outer.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.collect()
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _in_main() -> bool:
    """Signal handlers belong to the main thread."""
    return threading.current_thread() is threading.main_thread()
