"""`python run.py --help`: what can be chosen and changed, read from the comments of conf/**.yaml.

Only text is read, so that the answer takes a fraction of a second and says exactly what the files say.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ABOUT = """\
Research on LLM post-training. A run is composed of choices, one option per group: the algorithm (SFT, DPO and
its family, SimPO, CPO, ORPO, GRPO), the model, where its reference comes from, the data, the rewards and the hardware
strategy. Anything in the composed config can be changed on the command line. A combination that cannot
work is refused before a weight is loaded, with what to type instead."""

EXAMPLES = """\
  python run.py                                                       the defaults marked * below
  python run.py algorithm=dpo ref_strategy=frozen algorithm.beta=0.05   other options, another number
  python run.py -m algorithm=grpo,sft seed=1,2,3                      a sweep: one job for each combination
  python run.py resume=outputs/2026-12-01/10-20-30 algorithm.num_rollouts=40   go on with an earlier run, longer
  python run.py --cfg job algorithm=dpo                               show the composed config instead of running it"""

SYNTAX = """\
  group=option     choose                              key=null           no value (None is refused)
  key.inner=5e-7   change a value                      key=[a,b]          a list
  +key.inner=5     add a key that is not in the yaml   "key='a,b'"        text with a comma: key=a,b is a sweep (-m)
  ~key.inner       leave a key out                     output_dir=folder  where the run goes (the sweep, with -m)"""

WIDTH = 120
# Keys that are machinery, not settings.
MACHINERY = {"defaults", "hydra", "_target_", "_partial_", "_convert_", "_recursive_"}


@dataclass(frozen=True)
class Entry:
    """One key of a yaml file: dotted path, value as written ("" for a section) and the comment above it."""

    path: str
    value: str
    comment: str


def entries(file: Path) -> Iterator[Entry]:
    """Every key of a yaml file in order, machinery and what is below it left out."""
    sections: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
            continue
        match = re.match(r"( *)([\w./@-]+):(?:\s+(.*))?$", line)
        if match:
            indent, name, value = len(match[1]), match[2], (match[3] or "").strip()
            sections = [*((depth, above) for depth, above in sections if depth < indent), (indent, name)]
            path = [name for _, name in sections]
            if not MACHINERY & set(path):
                yield Entry(".".join(path), value, " ".join(comment))
        comment = []


def description(file: Path) -> str:
    """The first comment line: what an option is, in one line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith("#"):
            break
    return ""


def options(conf: Path, group: str) -> dict[str, Path]:
    """The options of a group: its yaml files, but neither `_private.yaml` nor what is in a subfolder."""
    return {file.stem: file for file in sorted((conf / group).glob("*.yaml")) if not file.stem.startswith("_")}


@functools.cache
def groups(conf: Path) -> dict[str, list[str]]:
    """Groups in the order of config.yaml's defaults, each with its chosen option(s), then those not chosen there."""
    chosen: dict[str, list[str]] = {}
    for item in yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8")).get("defaults", []):
        if isinstance(item, dict):
            for group, option in item.items():
                names = option if isinstance(option, list) else [option]
                chosen[group.removeprefix("optional ")] = [str(name) for name in names if name is not None]
    others = {folder.name: [] for folder in sorted(conf.iterdir()) if folder.is_dir() and folder.name not in chosen}
    return chosen | others


def overview(conf: Path) -> str:
    """The text of `--help`."""
    parts = [ABOUT, f"Examples\n{EXAMPLES}", f"On the command line\n{SYNTAX}"]
    lines = ["Groups (* = taken if nothing is said; `python run.py --help algorithm=dpo` shows an option's keys)"]
    for group, chosen in groups(conf).items():
        found = options(conf, group)
        if found:
            lines.append(f"  {group}")
            width = max(map(len, found))
            for name, file in found.items():
                mark = "*" if name in chosen else " "
                lines.append(_wrapped(f"   {mark} {name.ljust(width)}  ", description(file)))
    lines.append("")
    lines.append("Keys of every run (each group's keys: `python run.py --help <option>`)")
    lines.extend(_entry_line(entry) for entry in entries(conf / "config.yaml") if entry.value)
    tail = "Flags: -m sweep, --cfg job the composed config, --info defaults-tree where it comes from, --hydra-help all."
    return "\n\n".join([*parts, "\n".join(lines), tail])


def details(conf: Path, words: list[str]) -> str:
    """The text of `--help algorithm=dpo`, `--help dpo` or `--help algorithm`. LookupError if nothing is called so."""
    return "\n\n".join(block for word in words for block in _details(conf, word))


def _details(conf: Path, word: str) -> list[str]:
    group, _, option = word.partition("=")
    known = groups(conf)
    if group in known and not option:
        found = options(conf, group)
        width = max(map(len, found), default=0)
        return [
            "\n".join([group, *(_wrapped(f"  {name.ljust(width)}  ", description(f)) for name, f in found.items())])
        ]
    wanted = option or group
    pairs = [(g, wanted) for g in ([group] if option else known) if wanted in options(conf, g)]
    if not pairs:
        raise LookupError(word)
    return [_option(conf, g, name) for g, name in pairs]


def _option(conf: Path, group: str, name: str) -> str:
    file = conf / group / f"{name}.yaml"
    found: dict[str, Entry] = {}
    for source in [file, *_bases(file)]:
        for entry in entries(source):
            found.setdefault(entry.path, entry)
    prefix = _package(file, group)
    lines = [f"{group}={name}: {description(file)}"]
    lines += [_entry_line(Entry(f"{prefix}{e.path}", e.value, e.comment)) for e in found.values() if e.value]
    return "\n".join(lines)


def _package(file: Path, group: str) -> str:
    match = re.match(r"# @package (\S+)", file.read_text(encoding="utf-8"))
    package = match[1] if match else group
    return "" if package == "_global_" else f"{package.replace('_group_', group)}."


def _bases(file: Path) -> Iterator[Path]:
    """Files of the same group that a yaml starts from, nearest first."""
    for item in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults", []):
        if isinstance(item, str) and item != "_self_" and not item.startswith("/"):
            base = file.parent / f"{item.removesuffix('@_here_')}.yaml"
            yield base
            yield from _bases(base)


def _entry_line(entry: Entry) -> str:
    return f"  {entry.path}={entry.value}\n" + _wrapped("      ", entry.comment)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) if text else head.rstrip()
