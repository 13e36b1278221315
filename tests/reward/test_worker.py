"""The killable process: hangs, crashes, threads, orphans. Limits are short, bounds generous for a busy machine."""

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.reward.worker import Failed, Guard, TimedOut, Worker

CODE = """
import os, re, stat, subprocess, time
from neighbour import SHARED

def make(base):
    def lengths(items):
        for item in items:
            if item == "hang":
                time.sleep(60)
            if item == "stubborn":  # holds the interpreter lock: no thread and no alarm in the process could stop it
                re.match(r"(a+)+$", "a" * 40 + "b")
            if item == "raise":
                raise ValueError("no such item")
            if item == "die":
                os._exit(3)
            if item == "exit":
                raise SystemExit(0)
            if item == "children":
                child = subprocess.Popen(["sleep", "60"])
                open("child_pid", "w").write(str(child.pid))
                time.sleep(60)
            if item == "half":  # of an answer: what waits for the rest must not wait for ever
                for fd in range(3, 30):
                    try:
                        if stat.S_ISSOCK(os.fstat(fd).st_mode):
                            os.write(fd, b"\\0\\0\\1\\0x")
                    except OSError:
                        pass
                time.sleep(60)
            if item == "daemon":
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        open("child_pid", "w").write(str(os.getpid()))
                        time.sleep(60)
                    os._exit(0)
                time.sleep(60)
            if item == "pid":
                return [os.getpid()]
        return [base + SHARED + len(item) for item in items]
    return lengths

def broken():
    raise RuntimeError("cannot start")
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("SHARED = 0")
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "code.py")


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    """Dead, or a zombie that nobody has fetched yet."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_one_process_answers_many_calls(path: str) -> None:
    worker = Worker(f"{path}:make", 10)
    assert [worker.call(["abc"], timeout=30), worker.call(["", "a"], timeout=30)] == [[13], [10, 11]]
    assert worker.num_starts == 1
    worker.close()


@pytest.mark.parametrize("item", ["hang", "stubborn", "half"])
def test_a_hang_ends_at_the_limit_and_the_next_call_works(path: str, item: str) -> None:
    worker = Worker(f"{path}:make", 0)
    worker.start()
    pid, started = worker.pid, time.perf_counter()
    with pytest.raises(TimedOut, match=r"within 0\.3 s"):
        worker.call([item], timeout=0.3)
    assert time.perf_counter() - started < 5
    assert pid is not None
    assert is_gone(pid)
    assert worker.call(["abc"], timeout=30) == [3]
    worker.close()


@pytest.mark.parametrize("item", ["children", "daemon"])
def test_what_the_code_started_is_killed_with_it(path: str, item: str) -> None:
    worker = Worker(f"{path}:make", 0)
    worker.start()
    with pytest.raises(TimedOut):
        worker.call([item], timeout=2)
    assert is_gone(int(Path("child_pid").read_text()))


def test_errors_bring_their_traceback_and_cost_nothing(path: str) -> None:
    worker = Worker(f"{path}:make", 0, name="lengths")
    with pytest.raises(Failed, match=r"(?s)lengths failed.*code\.py.*no such item"):
        worker.call(["raise"], timeout=30)
    with pytest.raises(Failed, match="SystemExit"):
        worker.call(["exit"], timeout=30)
    assert worker.call(["abc"], timeout=30) == [3]
    assert worker.num_starts == 1
    worker.close()


def test_a_crash_is_told_from_a_hang(path: str) -> None:
    worker = Worker(f"{path}:make", 0)
    with pytest.raises(Failed, match="exit code 3"):
        worker.call(["die"], timeout=30)
    assert worker.call(["abc"], timeout=30) == [3]
    worker.close()


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "cannot start"), ("missing", r"no 'missing'; it defines .*'broken'")]
)
def test_a_factory_that_fails_says_so(path: str, name: str, message: str) -> None:
    with pytest.raises(Failed, match=message):
        Worker(f"{path}:{name}").start()


def test_it_works_from_threads(path: str) -> None:
    worker, answers = Worker(f"{path}:make", 0), {}

    def ask(n: int) -> None:
        answers[n] = worker.call(["x" * n], timeout=30)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [n] for n in range(8)}
    worker.close()


def test_a_copy_has_a_process_of_its_own(path: str) -> None:
    worker = Worker(f"{path}:make", 1)
    copy = pickle.loads(pickle.dumps(worker))
    assert worker.call(["pid"], timeout=30) != copy.call(["pid"], timeout=30)
    assert copy.call(["a"], timeout=30) == [2]
    worker.close()
    copy.close()


def test_a_fork_leaves_the_process_to_its_owner(path: str) -> None:
    worker = Worker(f"{path}:make", 0)
    own = worker.call(["pid"], timeout=30)
    child = os.fork()
    if child == 0:
        other = worker.call(["pid"], timeout=30)
        worker.close()
        os._exit(0 if other != own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.call(["pid"], timeout=30) == own
    worker.close()


def test_it_dies_with_its_object(path: str) -> None:
    worker = Worker(f"{path}:make", 0)
    worker.start()
    pid = worker.pid
    del worker
    assert pid is not None
    assert is_gone(pid)


@pytest.mark.parametrize("item", ["idle", "hang", "stubborn"])
def test_no_orphan_when_the_training_process_is_killed(path: str, item: str) -> None:
    code = f"""
import threading
from alignment.reward.worker import Worker
worker = Worker({path + ":make"!r}, 0)
worker.start()
print(worker.pid, flush=True)
threading.Thread(target=lambda: worker.call([{item!r}], timeout=60)).start()
threading.Event().wait()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(pid)


def test_a_guard_loses_only_what_hangs(path: str) -> None:
    guard = Guard(f"{path}:make", 0, timeout=1.0)
    guard.worker.start()
    started = time.perf_counter()
    assert guard(["a", "hang", "ccc"]) == [1, None, 3]
    assert time.perf_counter() - started < 5
    assert guard.counters == {"timeouts": 1, "errors": 0}
    assert guard(["a", "bb"]) == [1, 2]
    assert guard([]) == []
    guard.close()


def test_a_guard_loses_only_what_fails_where_that_is_asked_for(path: str) -> None:
    guard = Guard(f"{path}:make", 0, timeout=30, on_error="missing")
    assert guard(["a", "raise", "die", "dddd"]) == [1, None, None, 4]
    assert guard.counters == {"timeouts": 0, "errors": 2}
    guard.close()


@pytest.mark.parametrize("items", [["raise"], ["a", "raise"]])
def test_a_guard_raises_by_default(path: str, items: list[str]) -> None:
    guard = Guard(f"{path}:make", 0, timeout=30)
    with pytest.raises(Failed, match="no such item"):
        guard(items)
    guard.close()


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(UserError, match="positive"):
        Guard("x:y", timeout=0)
