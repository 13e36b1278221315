"""What a foreign program can do in the sandbox: each tries one thing and prints what came of it.

All programs run once, a few at a time, in one fixture: a process start is slow on a busy machine.
"""

import ctypes
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.reward.jail import PR_SET_CHILD_SUBREAPER, descendants
from alignment.reward.sandbox import Limits, Outcome, Sandbox

ROOT = Path(__file__).resolve().parents[2]
# Wall time is generous, because the machine may be busy; what must hit it, hits it in a sandbox of its own.
LIMITS = Limits(seconds=120, cpu_seconds=2, memory_mb=256, num_processes=8, file_mb=2, num_files=32, output_kb=64)

TRY = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        function(*args)
        print("done")
    except BaseException as error:
        print(type(error).__name__)
def call(*args):
    if libc[args[0]](*args[1:]):
        raise PermissionError
def write(path):
    with open(path, "w") as file:
        file.write("x")
"""

# name -> (program after TRY, what it prints). Where several attempts are made, one line each.
BLOCKED = {
    "reads the passwords": ("attempt(open, '/etc/passwd')", "FileNotFoundError"),
    "reads the checker": (f"attempt(open, {str(ROOT / 'alignment/reward/code.py')!r})", "FileNotFoundError"),
    "reads the test": (f"attempt(open, {__file__!r})", "FileNotFoundError"),
    "reads its own memory": ("attempt(open, '/proc/self/mem')", "FileNotFoundError"),
    "reads an environment": ("attempt(open, '/proc/1/environ')", "FileNotFoundError"),
    "lists processes": ("attempt(os.listdir, '/proc')", "FileNotFoundError"),
    "writes beside its folder": ("attempt(write, '/x')\nattempt(write, '/box/../x')", "OSError\nOSError"),
    "writes to /tmp": ("attempt(write, '/tmp/x')", "FileNotFoundError"),
    "writes into the library": ("attempt(write, os.__file__)", "OSError"),
    "deletes the library": ("attempt(os.remove, os.__file__)", "OSError"),
    "a link out": ("os.symlink('/etc/passwd', 'a')\nattempt(open, 'a')", "FileNotFoundError"),
    "a folder link out": ("os.symlink('/', 'a')\nattempt(write, 'a/x')", "OSError"),
    "a hard link out": ("attempt(os.link, os.__file__, 'a')", "OSError"),
    "climbs": ("os.chdir('../../../..')\nprint(os.getcwd())\nattempt(os.listdir, 'home')", "/\nFileNotFoundError"),
    "becomes root": ("attempt(os.setuid, 0)\nprint(os.geteuid() != 0)", "PermissionError\nTrue"),
    "makes a user namespace": ("attempt(call, 'unshare', 0x10000000)", "PermissionError"),
    "mounts": ("attempt(call, 'mount', b'none', b'/box', b'tmpfs', 0, None)", "PermissionError"),
    "mounts writable": ("attempt(call, 'mount', None, b'/usr/lib', None, 4128, None)", "PermissionError"),
    "leaves by chroot": ("attempt(os.chroot, '/box')", "PermissionError"),
    "makes a device": ("attempt(os.mknod, 'd', 0o60666, os.makedev(254, 0))", "PermissionError"),
    "renames the machine": ("attempt(socket.sethostname, 'x')", "PermissionError"),
    "raises its limits": ("attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))", "ValueError"),
    "signals its parent": ("print(os.getppid())\nattempt(os.kill, 1 << 20, 9)", "0\nProcessLookupError"),
    "signals the tests": (f"attempt(os.kill, {os.getpid()}, signal.SIGKILL)", "ProcessLookupError"),
    "traces the tests": (f"attempt(call, 'ptrace', 16, {os.getpid()}, 0, 0)", "PermissionError"),
    "uses other descriptors": (
        "found = []\nfor fd in range(3, 32):\n    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\n"
        "print(found)",
        "[]",
    ),
    "looks for secrets": ("print(sorted(os.environ), 'hidden' in str(os.environ))", "@environment"),
    "looks round": ("print(sorted(set(os.listdir('/')) - {'lib', 'lib64', 'usr', 'root', 'opt', 'home'}))", "@root"),
    "fills memory": ("attempt(bytearray, 1 << 30)", "MemoryError"),
    "fills the folder": (
        "def fill():\n    for n in range(9):\n        with open(str(n), 'wb') as f: f.write(bytes(1 << 20))\n"
        "attempt(fill)",
        "OSError",
    ),
    "a large file": ("attempt(lambda: open('a', 'wb').truncate(1 << 30))", "OSError"),
    "many files": ("attempt(lambda: [open('/dev/null') for _ in range(99)])", "OSError"),
    "many threads": (
        "attempt(lambda: [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(99)])\n"
        "sys.stdout.flush(); os._exit(0)",
        "RuntimeError",
    ),
    "a fork bomb": (
        "def bomb():\n    while True:\n        if os.fork() == 0: time.sleep(600)\nattempt(bomb)",
        "BlockingIOError",
    ),
    "shared memory": ("attempt(os.listdir, '/dev/shm')", "FileNotFoundError"),
    "a shell": ("attempt(subprocess.run, ['sh', '-c', 'true'])", "FileNotFoundError"),
}
EXPECTED = {
    "@environment": "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'] False",
    "@root": "['box', 'dev']",
}

# name -> (program, how it ends, exit code or None for any)
ENDS = {
    "computes for ever": ("while True: pass", "timeout", None),
    "computes for ever in C": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "timeout", None),
    "prints for ever": ("while True: print('x' * 1000)", "output", None),
    "exits with 3": ("import sys; sys.exit(3)", "exit", 3),
    "exits early": ("import os; os._exit(0)", "exit", 0),
    "raises": ("1 / 0", "exit", 1),
    "is no Python": ("def", "exit", 1),
    "crashes": ("import ctypes; ctypes.string_at(0)", "exit", 128 + 11),
    "forks and goes": ("import os, time\nif os.fork() == 0: time.sleep(600)", "exit", 0),
    "leaves a daemon with its output": (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        time.sleep(600)\n    os._exit(0)\nos.wait()",
        "exit",
        0,
    ),
}
SLEEPERS = {
    "sleeps": "import time; time.sleep(600)",
    "ignores signals": "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError: pass\ntime.sleep(600)",
    "closes its output": "import os, time; os.close(1); os.close(2); time.sleep(600)",
    "waits for a child": "import os, time\nif os.fork() == 0: time.sleep(600)\nos.wait()",
    "stops itself": "import os, signal, time\npid = os.fork()\nif pid: os.kill(pid, signal.SIGSTOP)\ntime.sleep(600)",
}


@pytest.fixture(scope="module")
def family() -> Iterator[set[int]]:
    """Our processes before the programs. Orphans become our children: none gets out of sight."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield set(descendants())
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def outcomes(family: set[int]) -> dict[str, Outcome]:
    os.environ["WANDB_API_KEY"] = "hidden"
    locked = Sandbox(LIMITS, require_isolation=True)
    brief = Sandbox(Limits(seconds=1, cpu_seconds=60, memory_mb=256, num_processes=8))
    sources = {name: TRY + source for name, (source, _) in BLOCKED.items()}
    sources |= {name: source for name, (source, *_) in ENDS.items()}
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(sources, pool.map(locked.run, sources.values()), strict=True))
        found |= dict(zip(SLEEPERS, pool.map(brief.run, SLEEPERS.values()), strict=True))
    del os.environ["WANDB_API_KEY"]
    return found


@pytest.mark.parametrize("name", BLOCKED)
def test_what_a_program_tries_fails(outcomes: dict[str, Outcome], name: str) -> None:
    expected = BLOCKED[name][1]
    outcome = outcomes[name]
    assert (outcome.end, outcome.stdout.decode().strip()) == ("exit", EXPECTED.get(expected, expected))


@pytest.mark.parametrize("name", ENDS)
def test_how_a_program_ends(outcomes: dict[str, Outcome], name: str) -> None:
    _, end, code = ENDS[name]
    assert outcomes[name].end == end
    assert code in (None, outcomes[name].code)


@pytest.mark.parametrize("name", SLEEPERS)
def test_a_program_that_sleeps_ends_at_the_limit(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].end == "timeout"


def test_nothing_is_left(outcomes: dict[str, Outcome], family: set[int]) -> None:
    assert len(outcomes) == len(BLOCKED) + len(ENDS) + len(SLEEPERS)
    assert set(descendants()) <= family
    assert not list(Path(tempfile.gettempdir()).glob(f"alignment-code-{os.getpid()}-*"))


def test_no_network() -> None:
    """Neither this machine's ports nor its abstract sockets, which have no file."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        name = f"\0alignment-{os.getpid()}"
        local.bind(name)
        local.listen()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it does listen
        connect = f"socket.create_connection, ('127.0.0.1', {port})"
        source = f"attempt({connect})\nattempt(socket.socket(socket.AF_UNIX).connect, {name!r})"
        outcome = Sandbox(LIMITS, require_isolation=True).run(TRY + source)
    assert outcome.stdout.decode().split() == ["OSError", "ConnectionRefusedError"]


def test_input_and_output_of_any_size() -> None:
    text = "ä" * 100_000 + "\n"
    limits = Limits(seconds=120, output_kb=200)
    assert Sandbox(limits).run("import sys; sys.stdout.write(sys.stdin.read())", text).stdout == text.encode()


def test_two_programs_of_one_text_are_the_same() -> None:
    """The order of a set of texts does not change from run to run, so neither does a score."""
    sandbox = Sandbox(LIMITS)
    first, second = (sandbox.run("print(set('abcdefghij'))").stdout for _ in range(2))
    assert first == second != b""


def test_without_namespaces_it_says_so_and_still_ends_everything(
    caplog: pytest.LogCaptureFixture, family: set[int]
) -> None:
    with caplog.at_level(logging.WARNING):
        bare = Sandbox(LIMITS, isolate=False)
    assert not bare.isolated
    assert "Not protected: network, files" in caplog.text
    daemon = bare.run(ENDS["leaves a daemon with its output"][0])
    assert (daemon.end, daemon.code) == ("exit", 0)
    assert bare.run("while True: pass").end == "timeout"
    assert bare.run("print(open('x', 'w').write('abc'))").stdout == b"3\n"
    assert set(descendants()) <= family


def test_isolation_can_be_demanded() -> None:
    with pytest.raises(UserError, match=r"require_isolation: .* switched off.*user namespaces"):
        Sandbox(LIMITS, isolate=False, require_isolation=True)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="memory_mb must be more than 0"):
        Limits(memory_mb=0)


def test_the_program_dies_with_the_process_that_scores(family: set[int]) -> None:
    """The training process killed in the middle of a program: its keeper sees that and ends it."""
    child = os.fork()
    if child == 0:
        sandbox = Sandbox(Limits(seconds=600), isolate=False)
        with sandbox.start({"program.py": "import time; time.sleep(600)"}, ["program.py"]) as program:
            program.ready()
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    until = time.monotonic() + 60
    while set(descendants()) - family and time.monotonic() < until:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # orphans come to us, see `family`
        time.sleep(0.05)
    assert set(descendants()) <= family
