"""The keeper of one foreign program: a small process of its own, between the training process and the program.

`sandbox.py` starts it as `python -I -S jail.py`, so this file imports the standard library alone. Three processes: the
keeper stays outside and ends everything, `enter` makes the namespaces, and the program's process locks itself in and
becomes the program by exec. The job comes as one message on the keeper's standard input, which then stays open: when
it closes, however the training process went, the keeper kills all that is left.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
# New mount, cgroup, host name, IPC, user, process and network namespaces.
UNSHARE = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # the same number on every architecture; Linux 5.12
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
PROGRAM_ID = 1000  # user and group of the program inside its namespace
NOBODY = 65534  # and outside, where the keeper is root: the kernel exempts root from the limit of processes
BOX = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
CHANNEL = 3  # file descriptor of the program's channel, where it has one


def main() -> None:
    """Start the job's program, wait for its end or for ours, kill what it left, and say how it went."""
    job = json.loads(read_message(0))
    checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")  # a daemon's new parent is this process
    try:
        code = keep(job)
    finally:
        kill_descendants()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(job, f"exit {code} {used.ru_utime + used.ru_stime}")


def keep(job: dict[str, Any]) -> int:
    """Start the program, and return its exit code when it has ended; -1 where we are told to end first."""
    failure, failure_theirs = os.pipe()
    alive, alive_theirs = os.pipe()
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        guarded(failure_theirs, enter, job, ours[1], theirs[0], failure_theirs)
    for fd in (failure_theirs, alive_theirs, ours[1], theirs[0]):
        os.close(fd)
    if job["isolate"] and os.read(ours[0], 1):
        write_maps(child)
        os.write(theirs[1], b"m")
    reason = read_all(failure)  # ends when the program's process has become the program
    say(job, f"failed: {reason}" if reason else "ready")
    if 0 in select.select([0, alive], [], [])[0]:
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def guarded(failure: int, function: Any, *args: Any) -> NoReturn:
    """Run a step of a forked process that must never return into its parent's code."""
    try:
        function(*args)
    except BaseException:
        os.write(failure, traceback.format_exc().encode())
    os._exit(127)


def say(job: dict[str, Any], line: str) -> None:
    os.write(job["status"], (json.dumps(line) + "\n").encode())


def read_message(fd: int) -> bytes:
    """One message: eight bytes of length, then the content."""
    size = int.from_bytes(read_exactly(fd, 8), "big")
    return read_exactly(fd, size)


def read_exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            os._exit(0)  # the training process went before it had said what to do
        data += part
    return bytes(data)


def read_all(fd: int) -> str:
    return b"".join(iter(lambda: os.read(fd, 65536), b"")).decode(errors="replace")


def checked(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def enter(job: dict[str, Any], tell: int, hear: int, failure: int) -> NoReturn:
    """Make the namespaces, start the program in them, and end with its exit code.

    This process is outside the new process namespace, which has effect on its children: the program is process 1 there,
    and the kernel kills everything in it when process 1 ends.
    """
    os.setsid()
    if job["isolate"]:
        checked(LIBC.unshare(UNSHARE), "unshare")
        os.write(tell, b"u")
        if not os.read(hear, 1):
            raise OSError(errno.EPERM, "no user map was written")
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # should the keeper itself be killed
    program = os.fork()
    if program == 0:
        guarded(failure, become, job)
    os.close(failure)
    for fd in (0, 1, *([job["channel"]] if job["channel"] else [])):
        os.close(fd)  # else the other side could not see that the program has ended
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def write_maps(child: int) -> None:
    """Who the program is: user 1000 inside; outside it is us, or nobody where we are root and may choose."""
    root = os.geteuid() == 0
    if not root:
        Path(f"/proc/{child}/setgroups").write_text("deny")
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        lines = f"0 0 1\n{PROGRAM_ID} {NOBODY} 1" if root else f"{PROGRAM_ID} {own} 1"
        Path(f"/proc/{child}/{kind}_map").write_text(lines)


def become(job: dict[str, Any]) -> NoReturn:
    """Lock this process in, then become the program."""
    os.umask(0o022)
    box = job["folder"]
    if job["isolate"]:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")  # the program gets no new privileges that way
        build_root(job["folder"], job["visible"], job["limits"]["file_mb"])
        box = BOX
    os.chdir(box)
    if job["isolate"] and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)  # gives up every capability with it
    for name, text in job["files"].items():
        Path(name).write_bytes(text.encode(errors="surrogatepass"))
    descriptors(job)
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # after the change of user, which resets it
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    limit(job["limits"])
    environment = {"HOME": box, "TMPDIR": box, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin"}
    os.execve(job["python"], [job["python"], "-s", "-S", "-P", "-B", "-X", "utf8", *job["argv"]], environment)


def descriptors(job: dict[str, Any]) -> None:
    """0: the job's input, from a file that has no name any more. 1: ours. 2: nowhere. 3: the channel, if there is one.

    Every other descriptor closes by exec.
    """
    path = Path(".stdin")
    path.write_bytes(job["stdin"].encode(errors="surrogatepass"))
    source = os.open(path, os.O_RDONLY)
    path.unlink()
    nowhere = os.open("/dev/null", os.O_WRONLY)
    channel = os.dup(job["channel"]) if job["channel"] else None
    for old, new in ((source, 0), (nowhere, 2)):
        os.dup2(old, new)
    if channel is not None:
        if job["channel"] != CHANNEL:
            os.set_inheritable(job["channel"], False)
        os.dup2(channel, CHANNEL)
    os.set_inheritable(job["status"], job["channel"] is not None and job["status"] == CHANNEL)


def limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] << 20),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def build_root(root: str, visible: list[str], size_mb: int) -> None:
    """A new file system in memory: the interpreter and its libraries, read only, and a scratch folder. Nothing else.

    There is no /proc either: a program finds no process there to read from, not even itself.
    """
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in (*visible, *DEVICES):
        show(path, root + path)
    os.makedirs(root + BOX)
    read_only(root, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    owner = f"uid={PROGRAM_ID},gid={PROGRAM_ID},mode=700"
    mount("tmpfs", root + BOX, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb}m,nr_inodes=1000,{owner}")
    os.chdir(root)
    pivot_root = {"x86_64": 155}.get(os.uname().machine, 41)  # 41: the generic table (arm64, riscv64, loongarch64)
    checked(LIBC.syscall(ctypes.c_long(pivot_root), b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def show(path: str, target: str) -> None:
    """The same path in the new root, read only. Links stay links."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    mount(path, target, "", MS_BIND | MS_REC)
    no_device = 0 if path in DEVICES else ATTR_NODEV
    read_only(target, ATTR_RDONLY | ATTR_NOSUID | no_device, AT_RECURSIVE)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    parts = [part.encode() for part in (source, target, kind)]
    result = LIBC.mount(*parts, ctypes.c_ulong(flags), options.encode() or None)
    checked(result, f"mount {source} {target}")


def read_only(path: str, attributes: int, flags: int) -> None:
    """mount_setattr(2): with AT_RECURSIVE also what is mounted below."""
    settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(settings))
    number, folder = ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(AT_FDCWD)
    checked(LIBC.syscall(number, folder, path.encode(), ctypes.c_uint(flags), settings, size), f"mount_setattr {path}")


def kill_descendants() -> None:
    """Kill and fetch every process below this one, until none is left. Daemons come to us, see PR_SET_CHILD_SUBREAPER.

    A program that forks faster than one pass kills loses by its limit of processes.
    """
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)


def descendants(root: int | None = None) -> list[int]:
    """All processes below one, ours unless another is named."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, queue = [], [os.getpid() if root is None else root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main())
