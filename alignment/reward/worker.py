"""A killable process for code that may hang: user rewards, symbolic mathematics, regular expressions from a config.

A time-out by alarm signal works only in the main thread, and a pool waits for its stuck worker on exit. So the code
runs in its own process, which is killed when it overruns and started again for the next call. The process is a fresh
interpreter, not a fork: it inherits neither the weights nor the threads of the training process, and starts in some
50 ms plus what it imports.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal

from alignment.errors import UserError
from alignment.reward.jail import LIBC, PR_SET_CHILD_SUBREAPER, descendants

START_SECONDS = 120.0  # importing sympy or a user's model on a busy machine; not part of a call's own limit


class TimedOut(Exception):
    """The call overran its limit; the process was killed and the next call gets a new one."""


class Failed(UserError):
    """The called code raised, or its process died. The message holds the traceback of the other side."""


def load(path: str) -> Any:
    """Import `package.module:name` or `some/file.py:name`; a file can import its neighbours, as a script can."""
    module_path, _, name = path.rpartition(":")
    if module_path.endswith(".py"):
        file = Path(module_path).resolve()
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_path)
    if not hasattr(module, name):
        raise ImportError(f"{module_path} has no '{name}'; it defines {sorted(n for n in vars(module) if n[0] != '_')}")
    return getattr(module, name)


class Worker:
    """One persistent child process that answers calls, one at a time, from any thread.

    factory: importable path, `package.module:name` or `file.py:name`. `factory(*args)` is called once in the new
    process and returns the function that then answers every call, so imports are paid once and outside a call's limit.
    name: what messages call it; the factory's path unless given.
    """

    def __init__(self, factory: str, *args: Any, name: str = "") -> None:
        self.factory, self.args, self.name = factory, args, name or factory
        self.num_starts = 0
        self._lock = threading.Lock()
        self._running: _Child | None = None

    def start(self) -> None:
        """Start the process now rather than at the first call, so that an import error shows before training."""
        with self._lock:
            self._child()

    def call(self, *args: Any, timeout: float) -> Any:
        """function(*args) in the child within `timeout` seconds. Raises TimedOut or Failed; both leave it usable."""
        with self._lock:
            return self._exchange(self._child(), args, timeout)

    def close(self) -> None:
        """Kill the process. A later call starts a new one."""
        with self._lock:
            self._drop()

    def __getstate__(self) -> dict[str, Any]:
        return {"factory": self.factory, "args": self.args, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["factory"], *state["args"], name=state["name"])

    @property
    def pid(self) -> int | None:
        return self._running.process.pid if self._running else None

    def _child(self) -> _Child:
        if self._running is not None and self._running.owner != os.getpid():
            self._running = None  # we are a fork: the child belongs to the process we were forked from
        if self._running is None:
            child = self._running = _Child()
            self._kill = weakref.finalize(self, child.kill)  # also runs at interpreter exit
            self.num_starts += 1
            try:
                self._exchange(child, (self.factory, self.args), START_SECONDS)
            except TimedOut as error:
                raise Failed(f"{self.name} was not ready after {START_SECONDS:g} s") from error
            except Failed:
                self._drop()
                raise
        return self._running

    def _exchange(self, child: _Child, message: Any, timeout: float) -> Any:
        request, answered, overran = pickle.dumps(message), False, threading.Event()

        def stop() -> None:
            overran.set()
            child.end()  # which ends the waiting below, wherever it is: half an answer may be there already

        timer = threading.Timer(timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            child.pipe.send_bytes(request)
            worked, answer = pickle.loads(child.pipe.recv_bytes())
            answered = True
        except (EOFError, OSError) as error:
            if overran.is_set():
                raise TimedOut(f"{self.name} did not answer within {timeout:g} s") from error
            raise Failed(f"the process of {self.name} died with exit code {child.kill()}") from error
        finally:
            timer.cancel()
            if not answered or overran.is_set():  # also after Ctrl-C: a late answer must not be taken for the next one
                self._drop()
        if not worked:
            raise Failed(f"{self.name} failed:\n{answer}")
        return answer

    def _drop(self) -> None:
        if self._running is not None:
            self._kill()
            self._running = None


class _Child:
    """The process and our ends of its two pipes: calls and answers, and a lifeline whose closing kills it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.pipe, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), lifeline)
        code = f"import sys; sys.path[:] = {sys.path!r}; from alignment.reward.worker import serve; serve{fds!r}"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
            )
        finally:
            theirs.close()
            os.close(lifeline)

    def kill(self) -> int | None:
        """Kill the process and whatever it started, reap it, and return its exit code. Safe to repeat."""
        if self.owner != os.getpid() or self.pipe.closed:
            return self.process.returncode
        self.pipe.close()
        os.close(self._lifeline)
        self.end()
        return self.process.wait()

    def end(self) -> None:
        """Kill the process and all below it, daemons too: they come to it, see `serve`. It is not reaped."""
        if self.process.returncode is not None:
            return
        below = descendants(self.process.pid) if os.path.isdir("/proc") else []
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def serve(pipe_fd: int, lifeline_fd: int) -> None:
    """The child: build the function, then answer calls until our parent hangs up."""
    _die_with_parent(lifeline_fd)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pipe = Connection(pipe_fd)
    function: Callable[..., Any] | None = None
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if function is None:
                factory, args = message
                function, answer = load(factory)(*args), None
            else:
                answer = function(*message)
            reply = pickle.dumps((True, answer))
        except (Exception, SystemExit):
            reply = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(reply)


def _die_with_parent(lifeline_fd: int) -> None:
    """Let the kernel kill this process group as soon as the training process is gone, however it went.

    A thread that waits for the parent cannot run while hung C code (a regular expression) holds the interpreter lock;
    SIGIO with its default action needs no Python. Linux: elsewhere SIGIO is ignored by default and the child ends at
    its next read.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if _hung_up(lifeline_fd):
        os._exit(1)  # the parent was gone before the signal was armed


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


class Guard:
    """Score a batch in a Worker, losing only those completions on which the code hangs or, on request, fails.

    The whole batch is one call. If that overruns or fails, the items are called one by one, each with the same limit:
    a single hang costs two limits, and the others keep their scores. Code that needs its whole batch at once (a rank
    within the group) therefore sees single items after a time-out.

    factory, args, name: as for Worker; the function takes a list of items and returns as many scores.
    timeout: seconds for one call.
    on_error: "raise" passes an exception on as Failed; "missing" turns that item into None.
    counters: "timeouts" and "errors", in items, since the start.
    """

    def __init__(
        self,
        factory: str,
        *args: Any,
        timeout: float,
        on_error: Literal["raise", "missing"] = "raise",
        name: str = "",
    ) -> None:
        if timeout <= 0:
            raise UserError(f"{name or factory}: timeout must be a positive number of seconds, got {timeout}")
        self.worker = Worker(factory, *args, name=name)
        self.timeout, self.on_error = timeout, on_error
        self.counters = {"timeouts": 0, "errors": 0}

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        """Scores of all items, by one call where that works."""
        if len(items) > 1:
            try:
                return self.worker.call(list(items), timeout=self.timeout)
            except TimedOut:
                pass
            except Failed:
                if self.on_error == "raise":
                    raise
        return [self.alone(item) for item in items]

    def alone(self, item: Any) -> Any:
        """Score of one item by a call of its own; None where that overran or, on request, failed."""
        try:
            scores = self.worker.call([item], timeout=self.timeout)
        except TimedOut:
            self.counters["timeouts"] += 1
            return None
        except Failed:
            if self.on_error == "raise":
                raise
            self.counters["errors"] += 1
            return None
        if not isinstance(scores, (list, tuple)) or len(scores) != 1:
            raise UserError(f"{self.worker.name} must return one score for one completion, got {scores!r:.200}")
        return scores[0]

    def close(self) -> None:
        """Kill the process."""
        self.worker.close()
