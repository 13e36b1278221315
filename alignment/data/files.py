"""Rows of JSON Lines, JSON, CSV and Parquet files, each with where it is; what cannot be read is reported, not the end.

Standard library only, except for Parquet.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.data.messages import RowProblem
from alignment.data.schema import Found
from alignment.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Files that `datasets.save_to_disk` writes: such a folder is read by the library, not file by file.
SAVED_BY_DATASETS = ("dataset_dict.json", "dataset_info.json", "state.json")


def find(path: str, key: str) -> list[Path]:
    """The files of a path: a file, a folder or a glob. UserError, naming the config key, where there is none."""
    place = Path(path).expanduser()
    if place.is_dir():
        if any((place / name).is_file() for name in SAVED_BY_DATASETS):
            raise UserError(f"{key}: {path} was saved by the datasets library: type data=hub data.name={path}")
        files = sorted(file for file in place.iterdir() if suffix(file) in SUFFIXES and not file.name.startswith("."))
        if not files:
            raise UserError(f"{key}: no {', '.join(SUFFIXES)} file is in {path}: type {key}=<file, folder or glob>")
        return files
    files = [place] if place.is_file() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    if not files:
        raise UserError(f"{key}: there is no file {path}: type {key}=<file, folder or glob>")
    unknown = [str(file) for file in files if suffix(file) not in SUFFIXES]
    if unknown:
        raise UserError(
            f"{key}: {unknown[0]} is none of {', '.join(SUFFIXES)} (.gz too): type {key}=<file, folder or glob>"
        )
    return files


def suffix(file: Path) -> str:
    """What kind of file it is; .gz on top of it is looked through."""
    name = file.name.lower().removesuffix(".gz")
    return f".{name.rpartition('.')[2]}" if "." in name else ""


def read(file: Path) -> Iterator[Found]:
    """(where, row or problem) for every row of a file, in order."""
    kind = suffix(file)
    if kind == ".parquet":
        yield from _parquet(file)
        return
    try:
        content = gzip.decompress(file.read_bytes()) if file.name.lower().endswith(".gz") else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        yield str(file), RowProblem("", f"cannot be read ({error})", "write it again")
        return
    content = content.removeprefix(b"\xef\xbb\xbf")
    if kind in (".csv", ".tsv"):
        yield from _csv(file, content, "\t" if kind == ".tsv" else ",")
    elif kind == ".json" and content.lstrip()[:1] == b"[":
        yield from _json_array(file, content)
    else:
        yield from _json_lines(file, content)


# ---- JSON ----------------------------------------------------------------------------------------------------------
def _json_lines(file: Path, content: bytes) -> Iterator[Found]:
    """One object per line, blank lines between them; or, in a .json file, one object over several lines."""
    lines = content.split(b"\n")
    if suffix(file) == ".json" and lines[0].strip() in (b"{", b""):
        yield from _json_object(file, content)
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{file}:{number}", _object(line)


def _json_object(file: Path, content: bytes) -> Iterator[Found]:
    """One object: {"data": [...]} holds the rows, as the datasets library has it, else it is the only row."""
    row = _object(content)
    if isinstance(row, dict) and len(row) == 1 and isinstance(next(iter(row.values())), list):
        for number, item in enumerate(next(iter(row.values())), 1):
            yield f"{file}, row {number}", _checked(item)
    else:
        yield f"{file}:1", row


def _object(line: bytes) -> dict[str, Any] | RowProblem:
    try:
        return _checked(json.loads(line))
    except (ValueError, RecursionError) as error:
        return _unreadable(error)


def _unreadable(error: ValueError | RecursionError) -> RowProblem:
    """What is wrong with JSON, in words."""
    if isinstance(error, UnicodeDecodeError):
        return RowProblem("", f"is not UTF-8 (byte {error.start + 1})", "save the file as UTF-8")
    if isinstance(error, RecursionError):
        return RowProblem("", "is nested too deeply", "mend or remove it")
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return RowProblem("", f"is not JSON ({error.msg}, {line}column {error.colno})", "mend or remove it")
    return RowProblem("", f"is not JSON that Python reads ({error})", "mend or remove it")  # a number of 5,000 digits


def _checked(value: Any) -> dict[str, Any] | RowProblem:
    if isinstance(value, dict):
        return value
    return RowProblem("", f"is a {type(value).__name__}, not an object", "write {field: value, ...}")


def _json_array(file: Path, content: bytes) -> Iterator[Found]:
    """The items of one array, each with the line it starts on; after a syntax error nothing more can be told apart."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield str(file), _unreadable(error)
        return
    decoder, line = json.JSONDecoder(), 1
    before, at = 0, _skip(text, text.index("[") + 1)
    while at < len(text) and text[at] != "]":
        line, before = line + text.count("\n", before, at), at
        try:
            value, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        except (ValueError, RecursionError) as error:
            yield f"{file}:{getattr(error, 'lineno', line)}", _unreadable(error)
            return
        yield f"{file}:{line}", _checked(value)
        at = _skip(text, at + 1) if text[at] == "," else at
    rest = "the array has no end" if at >= len(text) else "text after the array" if text[at + 1 :].strip() else ""
    if rest:
        yield f"{file}:{text.count(chr(10), 0, at + 1) + 1}", RowProblem("", f"is not JSON ({rest})", "mend it")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


# ---- CSV -----------------------------------------------------------------------------------------------------------
def _csv(file: Path, content: bytes, delimiter: str) -> Iterator[Found]:
    """One row per record under the header; an empty cell is an absent field, and a cell of JSON (messages) is read."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a long document is no error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield str(file), RowProblem("", f"is not UTF-8 (byte {error.start + 1})", "save the file as UTF-8")
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line, header = 1, None
    try:
        for cells in reader:
            if header is None:
                header = cells
                wrong = _header_problem(header)
                if wrong:
                    yield f"{file}:1", wrong
                    return
            elif cells:
                yield f"{file}:{line}", _record(header, cells)
            line = reader.line_num + 1
    except csv.Error as error:
        yield f"{file}:{line}", RowProblem("", f"is not CSV ({error})", "mend it")


def _header_problem(header: list[str]) -> RowProblem | None:
    twice = [name for name, count in Counter(header).items() if count > 1]
    if not any(name.strip() for name in header):
        what = "the header has no names"
    elif twice:
        what = f"the header names {twice[0]!r} twice"
    else:
        return None
    return RowProblem("", what, "write the names of the columns into the first line")


def _record(header: list[str], cells: list[str]) -> dict[str, Any] | RowProblem:
    if len(cells) != len(header):
        return RowProblem(
            "", f"has {len(cells)} cells, the header {len(header)}", "quote cells that contain the separator"
        )
    return {name: _cell(cell) for name, cell in zip(header, cells, strict=True)}


def _cell(cell: str) -> Any:
    if not cell:
        return None
    if cell.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell  # text that happens to begin with a bracket
    return cell


# ---- Parquet -------------------------------------------------------------------------------------------------------
def _parquet(file: Path) -> Iterator[Found]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            number = 0
            for batch in parquet.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        yield str(file), RowProblem("", f"is not Parquet ({error})", "write it again")
