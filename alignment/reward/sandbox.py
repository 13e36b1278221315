"""Foreign Python programs, each in a locked process of its own. What that protects from is in docs/rewards.md.

`jail.py` is the other side: the process between this one and the program.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alignment.errors import UserError

log = logging.getLogger(__name__)

START_SECONDS = 60.0  # the keeper and the interpreter on a busy machine; not part of a program's own limit
END_SECONDS = 20.0  # for the kernel to take down what was killed
JAIL, REMOTE = Path(__file__).with_name("jail.py"), Path(__file__).with_name("remote.py")

MISSING = (
    "network, files of this user (reading and writing), signals to this user's processes, the limit of memory files"
)


@dataclass(frozen=True)
class Limits:
    """What one program may use. seconds is wall time, cpu_seconds processor time of each process. memory_mb is address
    space of each process; file_mb is of each file, and of all files together where the scratch folder is in memory.
    """

    seconds: float = 20.0
    cpu_seconds: int = 5
    memory_mb: int = 512
    num_processes: int = 16
    file_mb: int = 16
    num_files: int = 64
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be more than 0, got {value}")


# Of assert-style tests: "gone" is a program that ended before the tests did.
Verdict = Literal["passed", "failed", "gone", "timeout"]


@dataclass(frozen=True)
class Outcome:
    """How a program ended. end: "exit" by itself (with `code`; 128 + n where signal n ended it), "timeout" or "output"
    killed by us at that limit. stdout: what it wrote, at most output_kb."""

    end: Literal["exit", "timeout", "output"]
    code: int
    stdout: bytes


class SandboxError(UserError):
    """The sandbox itself did not work: no statement about the program."""


class Sandbox:
    """Starts programs. Where the kernel lets us, each gets namespaces of its own; where not, that is said once.

    require_isolation: refuse where the namespaces cannot be made.
    """

    def __init__(self, limits: Limits, *, require_isolation: bool = False, isolate: bool = True) -> None:
        if sys.platform != "linux":
            raise UserError("foreign programs can be locked in on Linux alone: run this on Linux or leave reward=code")
        self.limits, self.isolated = limits, isolate
        reason = self._probe() if isolate else "it is switched off"
        if reason:
            self.isolated = False
            if require_isolation:
                raise UserError(
                    f"reward.code.require_isolation: this system does not let a program be locked in: {reason}. Allow "
                    "user namespaces (in a container: its seccomp and AppArmor profile), or set it to false"
                )
            log.warning("Code runs without namespaces (%s). Not protected: %s.", reason, MISSING)

    def run(self, source: str, stdin: str = "") -> Outcome:
        """Run one program to its end, within the limits."""
        with self.start({"program.py": source}, ["program.py"], stdin=stdin) as program:
            return program.finish()

    def start(
        self, files: Mapping[str, str], argv: Sequence[str], *, stdin: str = "", channel: int | None = None
    ) -> Program:
        """A program that runs: `python argv` in a scratch folder that holds `files`. channel: our descriptor of what it
        gets as its descriptor 3; may be closed here afterwards."""
        job = {"files": dict(files), "argv": list(argv), "stdin": stdin, "isolate": self.isolated}
        job["limits"] = vars(self.limits)
        return Program(job, self.limits, channel)

    def verdict(self, source: str, tests: str, entry_point: str | None = None) -> Verdict:
        """Assert-style tests of a program, which runs in another process than they do; see remote.py.

        entry_point: name of the program's function that the tests' `check(candidate)` gets.
        """
        ours, theirs = socket.socketpair()
        serve = json.dumps({"role": "serve", "source": source})
        check = json.dumps({"role": "check", "tests": tests, "entry_point": entry_point})
        files, argv = {"remote.py": REMOTE.read_text(encoding="utf-8")}, ["remote.py"]
        with ours, theirs, self.start(files, argv, stdin=serve, channel=theirs.fileno()) as program:
            theirs.close()
            with self.start(files, argv, stdin=check, channel=ours.fileno()) as tester:
                ours.close()
                program.ready()
                outcome = tester.finish()
                word = outcome.stdout.decode(errors="replace")
                # A program that used up its processor time is gone for the tests: it says how it ended.
                hung = word == "gone" and program.finish(seconds=1.0).end == "timeout"
        if outcome.end == "timeout" or hung:
            return "timeout"
        return "passed" if word == "passed" and outcome.code == 0 else "gone" if word == "gone" else "failed"

    def _probe(self) -> str:
        """Why namespaces cannot be had here; empty where they can."""
        try:
            outcome = self.run("print('in')")
        except SandboxError as error:
            return str(error).strip().splitlines()[-1]
        return "" if outcome.stdout == b"in\n" else f"a program in them ends with code {outcome.code}"


def visible() -> list[str]:
    """What a locked-in program sees of this machine: the interpreter, its standard library, the system's libraries."""
    python = os.path.realpath(sys.executable)
    libraries = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    return list(dict.fromkeys(path for path in (python, *libraries) if os.path.lexists(path)))


class Program:
    """One running program and its keeper. Use it in a `with`: whatever happens, nothing of it is left afterwards."""

    def __init__(self, job: dict[str, Any], limits: Limits, channel: int | None) -> None:
        self.limits, self._stdout, self._lines, self._rest = limits, bytearray(), [], b""
        self._folder = tempfile.mkdtemp(prefix=f"alignment-code-{os.getpid()}-")
        self._status, theirs = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(JAIL)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs, *([channel] if channel else [])],
                start_new_session=True,
                env={},
            )
        except BaseException:
            os.close(self._status)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(theirs)
        own = {"folder": self._folder, "python": os.path.realpath(sys.executable), "visible": visible()}
        message = json.dumps(job | own | {"status": theirs, "channel": channel or 0}).encode()
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):  # a keeper that is gone shows as one that was never ready
            self._keeper.stdin.write(len(message).to_bytes(8, "big") + message)
            self._keeper.stdin.flush()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until the program runs. SandboxError where it cannot be started."""
        self._pump(lambda: bool(self._lines), START_SECONDS)
        first = self._lines[0] if self._lines else "failed: its keeper did not answer"
        if first != "ready":
            raise SandboxError(f"a program could not be started: {first}")

    def finish(self, seconds: float | None = None) -> Outcome:
        """Wait for the end of the program, or make it."""
        self.ready()
        limit = self.limits.output_kb << 10
        ended = self._pump(lambda: len(self._lines) > 1, seconds or self.limits.seconds)
        self.close()
        code, used = -1, 0.0
        if ended and len(self._lines) > 1:
            code, used = int(self._lines[1].split()[1]), float(self._lines[1].split()[2])
        killed = code == 128 + signal.SIGKILL and used > 0.9 * self.limits.cpu_seconds  # by its processor time
        end = "output" if len(self._stdout) > limit else "exit" if ended and not killed else "timeout"
        return Outcome(end, code, bytes(self._stdout[:limit]))

    def _pump(self, done: Callable[[], bool], seconds: float) -> bool:
        """Read what comes until done() or the output is too much (True), or the time is over (False)."""
        assert self._keeper.stdout is not None
        until, sources = time.monotonic() + seconds, {self._keeper.stdout.fileno(), self._status}
        while not done():
            left = until - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for fd in sources:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(1000 * left):
                data = os.read(fd, 65536)
                if not data:
                    sources.discard(fd)
                elif fd == self._status:
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    self._lines += [json.loads(line) for line in lines]
                else:
                    self._stdout += data
            if len(self._stdout) > self.limits.output_kb << 10 or self._status not in sources:
                return True
        self._drain()
        return True

    def _drain(self) -> None:
        """What is still in the pipe when every writer but the keeper is dead."""
        assert self._keeper.stdout is not None
        fd = self._keeper.stdout.fileno()
        os.set_blocking(fd, False)
        with suppress(BlockingIOError):
            while data := os.read(fd, 65536):
                self._stdout += data
        os.set_blocking(fd, True)

    def close(self) -> None:
        """Kill the program and everything it started, and remove its folder. Safe to repeat."""
        keeper = self._keeper
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        if keeper.stdin.closed:
            return
        with suppress(BrokenPipeError):
            keeper.stdin.close()  # tells the keeper to kill and end
        keeper.stdout.close()
        try:
            keeper.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            keeper.kill()
            keeper.wait()
            raise SandboxError(f"a killed program was not gone after {END_SECONDS:g} s") from error
        finally:
            os.close(self._status)
            shutil.rmtree(self._folder, ignore_errors=True)
