"""Rows of JSON Lines, JSON, CSV and Parquet files, each with where it is; what cannot be read is reported, not the end.

Standard library only, except for Parquet.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from alignment.data.messages import RowProblem, shown
from alignment.data.schema import ANSWERS, KNOWN, QUESTIONS, Found
from alignment.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Files that `datasets.save_to_disk` writes: such a folder is read by the library, not file by file.
SAVED_BY_DATASETS = ("dataset_dict.json", "dataset_info.json", "state.json")
BOM = b"\xef\xbb\xbf"
HEAD = 4096  # bytes that show what a file is
# What is often found under a name that promises rows, by its first bytes.
MAGIC = (
    (b"\xff\xfe\0\0", "UTF-32", "save the file as UTF-8"),
    (b"\xff\xfe", "UTF-16", "save the file as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save the file as UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32", "save the file as UTF-8"),
    (b"\x1f\x8b", "compressed by gzip", "let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it, or compress it with gzip"),
    (b"BZh", "compressed by bzip2", "unpack it, or compress it with gzip"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"PAR1", "Parquet", "let its name end in .parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the data: git lfs pull"),
    (b"<!DOCTYPE", "a web page", "fetch the data itself"),
    (b"<!doctype", "a web page", "fetch the data itself"),
    (b"<html", "a web page", "fetch the data itself"),
    (b"<?xml", "XML", "fetch the data itself"),
)
# Fields of a CSV file that are text even where the text is JSON: a completion may be a list of numbers.
TEXTS = {"prompt", "completion", "chosen", "rejected", "text", "instruction", "input", "context", "response", "output"}
TEXTS |= {"system", *QUESTIONS, *ANSWERS}


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
    """(where, row or problem) for every row of a file, in order; JSON Lines, CSV and Parquet are read bit by bit."""
    kind = suffix(file)
    if kind == ".parquet":
        yield from _parquet(file)
        return
    try:
        with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as handle:
            head = handle.read(HEAD).removeprefix(BOM).lstrip()
            handle.seek(0)
            if wrong := _not_text(head):
                yield str(file), wrong
            elif kind in (".csv", ".tsv"):
                yield from _csv(file, handle, "\t" if kind == ".tsv" else ",")
            elif kind == ".json":
                yield from _json(file, handle.read().removeprefix(BOM))
            elif head.partition(b"\n")[0].strip() in (b"{", b"["):
                what = "begins an object that goes on over several lines"
                yield (
                    f"{file}:1",
                    RowProblem("", what, "write one object per line, or let the file's name end in .json"),
                )
            else:
                yield from _json_lines(file, handle)
    except (OSError, EOFError, zlib.error) as error:
        yield str(file), RowProblem("", f"cannot be read ({error})", "write it again")


def _not_text(head: bytes) -> RowProblem | None:
    """What the first bytes show a file to be instead of text in UTF-8."""
    kind, todo = next(((what, todo) for magic, what, todo in MAGIC if head.startswith(magic)), ("", ""))
    if not kind and len(head) > 1 and (head[0] == 0) != (head[1] == 0):  # every other byte of Latin text is 0
        kind, todo = "UTF-16", "save the file as UTF-8"
    return RowProblem("", f"is {kind}, not text in UTF-8", todo) if kind else None


# ---- JSON ----------------------------------------------------------------------------------------------------------
def _json(file: Path, content: bytes) -> Iterator[Found]:
    """One array, one object, or JSON Lines under the wrong name."""
    first, _, rest = content.lstrip().partition(b"\n")
    if first[:1] == b"[":
        yield from _json_array(file, content)
    elif first and (not rest.strip() or isinstance(_object(first), RowProblem)):
        yield from _json_object(file, content)
    else:
        yield from _json_lines(file, io.BytesIO(content))


def _json_lines(file: Path, handle: Iterable[bytes]) -> Iterator[Found]:
    """One object per line, blank lines between them."""
    for number, line in enumerate(handle, 1):
        if line.strip():
            yield f"{file}:{number}", _object(line.rstrip())


def _json_object(file: Path, content: bytes) -> Iterator[Found]:
    """One object: {"data": [...]} holds the rows, as the datasets library has it, else it is the only row."""
    row = _object(content)
    name, rows = next(iter(row.items()), ("", None)) if isinstance(row, dict) else ("", None)
    if isinstance(row, dict) and len(row) == 1 and name not in KNOWN and isinstance(rows, list):
        for number, item in enumerate(rows, 1):
            yield f"{file}, row {number}", _checked(item)
    else:
        yield f"{file}:1", _one_row(row) if isinstance(row, dict) else row


def _one_row(row: dict[str, Any]) -> dict[str, Any] | RowProblem:
    """A row that is a whole file, unless it shows to be a table: rows under one of its names, or columns."""
    under = [name for name, value in row.items() if name not in KNOWN and _is_table(value)]
    if under and not set(KNOWN) & set(row):
        return RowProblem(under[0], "may hold the rows, but there is more beside it", f"leave only {under[0]!r} in it")
    columns = [name for name in KNOWN if isinstance(row.get(name), list) and isinstance(next(iter(row[name]), ""), str)]
    lists = {name for name, value in row.items() if isinstance(value, list)}
    if len(columns) > 1 and len({len(row[name]) for name in lists}) == 1 and lists == set(row):
        return RowProblem(columns[0], "is a column, not a value", "write a list of rows: [{field: value, ...}, ...]")
    return row


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two values under one name, one would be lost in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _Twice(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return made


class _Twice(ValueError):
    """A name that an object has twice."""


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _object(line: bytes) -> dict[str, Any] | RowProblem:
    try:
        return _checked(DECODER.decode(line.removeprefix(BOM).decode("utf-8")))
    except (ValueError, RecursionError) as error:
        return _unreadable(error)


def _unreadable(error: ValueError | RecursionError) -> RowProblem:
    """What is wrong with JSON, in words."""
    if isinstance(error, UnicodeDecodeError):
        return RowProblem("", f"is not UTF-8 (byte {error.start + 1})", "save the file as UTF-8")
    if isinstance(error, RecursionError):
        return RowProblem("", "is nested too deeply", "mend or remove it")
    if isinstance(error, _Twice):
        return RowProblem(str(error), "comes twice in one object", "leave one of them")
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
    line = 1
    before, at = 0, _skip(text, text.index("[") + 1)
    while at < len(text) and text[at] != "]":
        line, before = line + text.count("\n", before, at), at
        try:
            value, at = DECODER.raw_decode(text, at)
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
def _csv(file: Path, handle: Iterable[bytes], delimiter: str) -> Iterator[Found]:
    """One row per record under the header; an empty cell is an absent field, and a cell of JSON (messages) is read."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a long document is no error
    reader = csv.reader(_text_lines(handle), delimiter=delimiter, strict=True)
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
    except UnicodeDecodeError as error:
        yield f"{file}:{reader.line_num + 1}", _unreadable(error)


def _text_lines(handle: Iterable[bytes]) -> Iterator[str]:
    """Lines with their ends; the carriage returns of old files end a line too."""
    for line in handle:
        text = line.removeprefix(BOM).decode("utf-8")
        yield from re.split(r"(?<=\r)(?!\n|$)", text) if "\r" in text else [text]


def _header_problem(header: list[str]) -> RowProblem | None:
    twice = [name for name, count in Counter(header).items() if count > 1]
    if not any(name.strip() for name in header):
        what = "the header has no names"
    elif len(header) == 1 and len(re.split(r"[;\t|]", header[0])) > 1:
        what = f"the header {shown(header[0])} has no comma"
    elif twice:
        what = f"the header names {twice[0]!r} twice"
    else:
        return None
    return RowProblem("", what, "write the names of the columns into the first line, with commas (.csv) or tabs (.tsv)")


def _record(header: list[str], cells: list[str]) -> dict[str, Any] | RowProblem:
    if len(cells) != len(header):
        return RowProblem(
            "", f"has {len(cells)} cells, the header {len(header)}", "quote cells that contain the separator"
        )
    return {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}


def _cell(name: str, cell: str) -> Any:
    """Null, text, or what a cell of JSON holds. Fields that are text stay text, unless they hold messages."""
    if not cell:
        return None
    if cell.lstrip()[:1] in ("[", "{"):
        try:
            value = DECODER.decode(cell)
        except (ValueError, RecursionError):
            return cell  # text that happens to begin with a bracket
        turns = value if isinstance(value, list) and value else [value]
        messages = all(isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in turns)
        return cell if name in TEXTS and not messages else value
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
