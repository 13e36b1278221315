from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.model.cache import build_once, cache_root


def test_the_environment_chooses_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.setenv("ALIGNMENT_CACHE", "~/there")
    assert cache_root() == Path.home() / "there"
    monkeypatch.delenv("ALIGNMENT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "alignment"


def write(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("whole")
    (folder / "sub" / "file").chmod(0o600)


def test_a_folder_is_built_once_and_readable_as_the_umask_allows(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    old = os.umask(0o022)
    try:
        assert build_once(target, write) == target
    finally:
        os.umask(old)
    assert (target / "sub" / "file").read_text() == "whole"
    assert (target / "sub" / "file").stat().st_mode & 0o777 == 0o644
    build_once(target, lambda folder: pytest.fail("built a second time"))


def test_a_failed_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_what_a_killed_process_left_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "half").write_text("half")
    build_once(tmp_path / "model", write)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["sub"]


def test_a_root_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="ALIGNMENT_CACHE"):
        build_once(tmp_path / "file" / "model", write)


def slow_build(folder: Path) -> None:
    with open(folder.parent / "builds", "a") as file:
        file.write("x")
    time.sleep(0.3)
    (folder / "file").write_text("whole")


def start(folder: str) -> None:
    assert (build_once(Path(folder), slow_build) / "file").read_text() == "whole"


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=start, args=(str(tmp_path / "model"),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"
