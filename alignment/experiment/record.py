"""The files of a run's folder: manifest.json, metrics.csv, samples.jsonl, summary.json.

Whole files are replaced in one step, so a reader never sees half of one. Files that grow lose a line that was cut off
by a kill when the next one is added. All of this is for rank 0 alone.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from alignment.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# The only environment variables that are recorded: they change what a run computes, and hold no secrets.
ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "WORLD_SIZE",
)  # fmt: skip
SECRET = re.compile(
    r"((?:^|.*[.+-])(?:\w*api_?key|\w*secret\w*|passw\w*|credentials?|(?:(?:hf|hub|auth|access|api)_)?token))=.*",
    re.I | re.S,
)


# ---- whole files ---------------------------------------------------------------------------------------------------
def write_manifest(folder: str | Path, *, seed: int, data: Mapping[str, Any]) -> Path:
    """manifest.json: what it takes to repeat the run: command, code, packages, machine, seed, data fingerprints.

    A run that is resumed keeps the record of its first start; each later one is added to "resumed".
    """
    path, start = Path(folder) / "manifest.json", _start(seed, data)
    if path.exists():
        first = json.loads(path.read_text(encoding="utf-8"))
        first.setdefault("resumed", []).append(start)
        start = first
    return _replace(path, _json(start))


def write_summary(folder: str | Path, summary: Mapping[str, Any]) -> Path:
    """summary.json: final metrics, time and memory. A value that is not finite is null, as JSON has no NaN."""
    return _replace(Path(folder) / "summary.json", _json(plain(summary, "summary")))


def _start(seed: int, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(without_secrets(sys.orig_argv)),
        "working_directory": os.getcwd(),
        "seed": seed,
        "data": dict(data),
        "git": git_state(ROOT),
        "machine": machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "python": platform.python_version(),
        "packages": packages(),
    }


def without_secrets(words: Iterable[str]) -> list[str]:
    """A command line in which the values of keys and passwords are replaced by ***."""
    return [SECRET.sub(r"\1=***", word) for word in words]


def packages() -> dict[str, str]:
    """Name -> version of everything installed."""
    found = ((dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions())
    return dict(sorted(((name, version) for name, version in found if name), key=lambda pair: pair[0].lower()))


def machine() -> dict[str, Any]:
    """Processor, memory, threads and GPUs."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [{"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1)} for p in properties],
        "cuda": torch.version.cuda,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, branch and a hash of everything that is not committed; None outside a git checkout."""
    inside = _git(root, "rev-parse", "--show-toplevel")
    if inside is None or Path(os.fsdecode(inside.strip())).resolve() != root.resolve():
        return None
    commit = (_git(root, "rev-parse", "HEAD") or b"").decode().strip() or None
    changes = (_git(root, "diff", "HEAD", "--binary") if commit else None) or b""
    files = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    new = [root / os.fsdecode(name) for name in sorted(filter(None, files))]
    branch = (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b"").decode().strip()
    dirty = bool(changes or new)
    return {
        "commit": commit,
        "branch": branch if commit else None,
        "dirty": dirty,
        "uncommitted_sha256": _uncommitted(root, changes, new) if dirty else None,
    }


def _uncommitted(root: Path, changes: bytes, new: Iterable[Path]) -> str:
    digest = hashlib.sha256(changes)
    for path in new:
        digest.update(os.fsencode(path.relative_to(root)))
        # A large new file is no code: its size will do.
        size = path.stat().st_size if path.is_file() else 0
        digest.update(path.read_bytes() if path.is_file() and size < 2**20 else str(size).encode())
    return digest.hexdigest()


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# ---- metrics.csv ---------------------------------------------------------------------------------------------------
class MetricsFile:
    """metrics.csv: one row per (step, phase), one column per metric, empty where a metric was not measured.

    A metric may appear at any time: the file is then written again with one more column. What is logged for a (step,
    phase) that is there already is merged into its row, the later value winning. Every row is on disk when `append`
    returns.
    """

    KEYS = ("step", "phase")

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "metrics.csv"
        self._size = -1  # of the file as we know it: another size means that somebody else wrote
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}  # the last row, which begins at byte _start
        self._start = 0
        self._keys: set[tuple[int, str]] = set()  # of the rows of the last row's step

    def append(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Add metrics, all numbers. TypeError names one that is not."""
        row = {"step": int(step), "phase": phase} | {name: number(name, value) for name, value in metrics.items()}
        self._notice_changes()
        key, last = (row["step"], phase), self._last
        if not self._columns or row.keys() - set(self._columns) or (last and row["step"] < last["step"]):
            self._merge(row)
        elif last and key == (last["step"], last["phase"]):
            self._write_row(last | row, self._start)
        elif key in self._keys:
            self._merge(row)
        else:
            self._write_row(row, self._size)

    def read(self) -> list[dict[str, Any]]:
        """Rows in the order of the file: step int, phase str, metrics float; what is empty is absent."""
        return list(self._rows())

    def truncate_after(self, step: int) -> None:
        """Forget every row of a later step: what a resumed run is about to write again."""
        rows = self.read()
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            self._rewrite(kept)

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        text = _whole_lines(self.path.read_bytes()).decode()
        reader = csv.reader(io.StringIO(text))
        columns = next(reader, list(self.KEYS))
        if tuple(columns[:2]) != self.KEYS:
            raise UserError(f"{self.path} does not begin with the columns step and phase: move it away")
        for cells in reader:
            values = {name: float(cell) for name, cell in zip(columns[2:], cells[2:], strict=True) if cell}
            yield {"step": int(cells[0]), "phase": cells[1]} | values

    def _merge(self, row: dict[str, Any]) -> None:
        rows = self.read()
        for other in rows:
            if (other["step"], other["phase"]) == (row["step"], row["phase"]):
                other.update(row)
                break
        else:
            rows.append(row)
        self._rewrite(rows)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._columns = list(dict.fromkeys([*self.KEYS, *(name for row in rows for name in row)]))
        lines = [_csv_line(self._columns), *(self._line(row) for row in rows)]
        _replace(self.path, "".join(lines))
        self._size = self.path.stat().st_size
        self._last = rows[-1] if rows else {}
        self._start = self._size - len(lines[-1].encode())
        self._keys = {(row["step"], row["phase"]) for row in rows if row["step"] == self._last["step"]}

    def _write_row(self, row: dict[str, Any], start: int) -> None:
        line = self._line(row).encode()
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(line)
            file.truncate()
        self._keys = {key for key in self._keys if key[0] == row["step"]} | {(row["step"], row["phase"])}
        self._last, self._start, self._size = row, start, start + len(line)

    def _line(self, row: dict[str, Any]) -> str:
        return _csv_line(row.get(name, "") for name in self._columns)

    def _notice_changes(self) -> None:
        """Read the file again if it is not as we left it: a resumed run, or a run that was killed within a line."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size and size:
            self._rewrite(self.read())
        elif not size:
            self._size, self._columns, self._last, self._keys = 0, [], {}, set()


def number(name: str, value: Any) -> float:
    """A metric as a float: a number, or an array or tensor with one element."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"metric '{name}' is {value!r:.100}, not a number")
    return float(value)


def _csv_line(cells: Iterable[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


# ---- samples.jsonl -------------------------------------------------------------------------------------------------
class Samples:
    """samples.jsonl: one completion per line, with its step, phase, prompt, reward, parts and advantage."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "samples.jsonl"

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records; each has at least `step` and `phase`. Numbers that are not finite become null."""
        lines = []
        for record in records:
            missing = {"step", "phase"} - record.keys()
            if missing:
                raise ValueError(f"a sample needs {sorted(missing)} as well: {dict(record)!r:.200}")
            lines.append(json.dumps(plain(record, "sample", finite=True), ensure_ascii=False) + "\n")
        with self.path.open("a+b") as file:
            _cut_torn_line(file)
            file.write("".join(lines).encode("utf-8", errors="replace"))  # half a surrogate pair is no text

    def read(self) -> Iterator[dict[str, Any]]:
        """Records in the order of the file."""
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from (json.loads(line) for line in file if line.endswith(b"\n"))

    def truncate_after(self, step: int) -> None:
        """Forget every record of a later step."""
        if not self.path.exists():
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        with self.path.open("rb") as file, temporary.open("wb") as kept:
            kept.writelines(line for line in file if line.endswith(b"\n") and json.loads(line)["step"] <= step)
        os.replace(temporary, self.path)


# ---- helpers -------------------------------------------------------------------------------------------------------
def plain(value: Any, where: str, *, finite: bool = False) -> Any:
    """A value in the types that yaml and JSON share. TypeError names the place of one that has no such form.

    finite: turn NaN and infinities into None.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item, f"{where}.{name}", finite=finite) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", finite=finite) for i, item in enumerate(value)]
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist(), where, finite=finite)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) or not finite else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, which cannot be written to a file: {value!r:.100}")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(plain(value, "", finite=True), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> Path:
    """Write a file so that it is either the old or the new one, even if the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def _whole_lines(content: bytes) -> bytes:
    """Without the end of a line that was never finished."""
    return content[: content.rfind(b"\n") + 1]


def _cut_torn_line(file: io.BufferedRandom) -> None:
    """Take a line off the end of an open file that was cut off before its newline."""
    end = file.seek(0, os.SEEK_END)
    place = end
    while place:
        start = max(0, place - 2**16)
        file.seek(start)
        found = file.read(place - start).rfind(b"\n")
        if found >= 0:
            place = start + found + 1
            break
        place = start
    if place < end:
        file.truncate(place)
