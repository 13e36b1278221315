"""The user's cache folder, and folders in it that are made once: by one process, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from alignment.errors import UserError


def cache_root() -> Path:
    """`$ALIGNMENT_CACHE`, else `~/.cache/alignment`."""
    return Path(os.environ.get("ALIGNMENT_CACHE") or "~/.cache/alignment").expanduser()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first letting `build` write its content if it does not exist.

    `build` gets an empty folder beside the final one, which is renamed only after `build` returned: an interrupted
    build leaves nothing that looks finished. Processes that start together wait for the first one.
    Raises UserError naming ALIGNMENT_CACHE where the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot write {folder.parent} ({error}): set ALIGNMENT_CACHE to a folder you can write"
        ) from error
    try:
        if not folder.is_dir():
            _build(folder, build)
    finally:
        lock.release()
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left; nobody else is here, we hold the lock
    partial.mkdir()
    try:
        build(partial)
        readable = partial.stat().st_mode & 0o666  # safetensors writes for the owner only; the umask may allow more
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(readable)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
