"""Compose, validate, start. Only this file and run.py know Hydra and OmegaConf; everybody else gets plain dicts.

`preflight` answers before anything heavy is imported, with every problem of the command line and of every job at once:
override grammar, choices, keys, missing values, interpolations, signatures (`signatures.py`), combinations (`rules.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import inspect
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from alignment import help as manual
from alignment import jobs, rules, signatures
from alignment.errors import ConfigError, Interrupted, UserError

CONF = Path(__file__).resolve().parent.parent / "conf"
VERSION_BASE = "1.3"
# Seconds that checking the jobs of a sweep may take; the rest is checked as each starts.
SWEEP_BUDGET = 20.0

# Arguments that code adds when it builds a node of a group; they are not keys.
PASSED: dict[str, set[str]] = {
    "algorithm": {"source", "reference", "optimizer", "callbacks"},
    "optimizer": {"params", "lr"},
    "task": {"cfg"},
}
# Sections without `_target_`, and the function that takes their keys together with these arguments of code.
SECTIONS: dict[str, tuple[str, set[str]]] = {
    "encoding": ("alignment.data.encode.encode", {"rows", "form", "tokenizer"}),
    "checkpoint": ("alignment.callbacks.checkpoint.checkpoint_callback", {"folder", "online"}),
    "trainer": ("lightning.pytorch.Trainer", set()),
}
# Groups of which nothing need be chosen.
MAY_BE_EMPTY = {"reward", "logger", "experiment", "pipeline"}


# ---- for everybody ------------------------------------------------------------------------------------------------------
def build(node: Mapping[str, Any], **passed: Any) -> Any:
    """Instantiate a node with `_target_`, every container in it a plain one, plus the arguments `passed` by code.

    `passed` does not go through Hydra, which would turn dataclass instances and lists into containers of its own. With
    `_partial_: true` the result is a partial of both.
    """
    try:
        made = instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise _without_hydra_frames(error) from error
    made = functools.partial(made, **passed)
    return made if node.get("_partial_") else made()


def _without_hydra_frames(error: InstantiationException) -> Exception:
    """The error underneath where it is the user's, a missing package in words, else Hydra's own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return UserError(f"{str(error).splitlines()[0]} needs the package {cause.name}: type pip install {cause.name}")
        cause = cause.__cause__ or cause.__context__
    return error


def check_external(cfg: dict[str, Any]) -> None:
    """Bind the targets of other packages, now that importing them is paid for anyway. ConfigError with every problem."""
    problems = []
    for key, node, target, passed in _targets(cfg):
        if target.startswith(f"{signatures.PACKAGE}."):
            continue
        try:
            parameters = inspect.signature(get_object(target)).parameters
        except Exception as error:  # importing runs foreign code: whatever it raises, this choice cannot be used
            problems.append(f"{key}._target_: {target} cannot be imported ({error}): type --help {key.split('.')[0]}")
            continue
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        names = set(parameters) - passed
        given = set(node) - signatures.HYDRA_KEYS
        why = f"{target} takes no such key"
        problems += [signatures.unknown(f"{key}.{name}", names, why) for name in sorted(given - names)]
    if problems:
        raise ConfigError(problems)


# ---- validation of one plain config -------------------------------------------------------------------------------------
def validate(cfg: dict[str, Any]) -> list[str]:
    """Every problem of a plain, resolved config."""
    found = [*_schema_problems(cfg)]
    for key, node, target, passed in _targets(cfg):
        found += signatures.bind(key, node, target, passed)
    reported = {message.split(":", 1)[0] for message in found}
    return found + [message for message in rules.problems(cfg) if message.split(":", 1)[0] not in reported]


def _targets(cfg: dict[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str, set[str]]]:
    """Every (key, node, target, arguments passed by code), the sections of SECTIONS included."""
    for key, node in _nodes(cfg):
        yield key, node, str(node["_target_"]), PASSED.get(key, set())
    for key, (target, passed) in SECTIONS.items():
        if isinstance(cfg.get(key), dict):
            yield key, cfg[key], target, passed


def _nodes(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict) and "_target_" in value:
        yield path, value
    for name, inner in items:
        yield from _nodes(inner, f"{path}.{name}" if path else str(name))


@functools.cache
def _schema() -> dict[str, Any]:
    """The keys of conf/config.yaml that belong to no group, with their defaults."""
    schema = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    assert isinstance(schema, dict)
    return {str(name): value for name, value in schema.items() if name not in ("defaults", "hydra")}


def _schema_problems(cfg: dict[str, Any]) -> Iterator[str]:
    schema, groups = _schema(), manual.groups(CONF)
    for name in cfg:
        if name not in schema and name not in groups:
            yield signatures.unknown(name, [*schema, *groups], "there is no such key")
    for group, chosen in groups.items():
        if chosen and group not in cfg and group not in MAY_BE_EMPTY:
            yield f"{group}: nothing is chosen: type {group}={chosen[0]}"
    for name, default in schema.items():
        if name in SECTIONS:
            continue
        if not isinstance(default, dict):
            yield from _compare(name, name in cfg, cfg.get(name), default)
            continue
        section = cfg.get(name) if isinstance(cfg.get(name), dict) else {}
        assert isinstance(section, dict)
        for key in section:
            if key not in default:
                yield signatures.unknown(f"{name}.{key}", default, "there is no such key")
        for key, value in default.items():
            yield from _compare(f"{name}.{key}", key in section, section.get(key), value)


def _compare(key: str, is_there: bool, value: Any, default: Any) -> Iterator[str]:
    """A key without a signature has the type of its default; null says nothing about it."""
    kinds: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,), list: (list,)}
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list, as [a,b]"}
    if not is_there:
        yield f"{key}: missing: type +{key}={'null' if default is None else default}"
    elif value is not Unset and default is not None and type(value) not in kinds[type(default)]:
        yield signatures.wrong_type(key, value, [words[type(default)]])


# ---- the command line ---------------------------------------------------------------------------------------------------
@dataclass
class Command:
    """A command line: Hydra's flags, the overrides, and what they ask for."""

    flags: argparse.Namespace
    overrides: list[str]
    unknown_flags: list[str] = field(default_factory=list)
    resume: Path | None = None

    @property
    def multirun(self) -> bool:
        return bool(self.flags.multirun) or any("hydra.mode=MULTIRUN" in line for line in self.overrides)

    @property
    def shows(self) -> bool:
        """Whether Hydra only prints something."""
        flags = self.flags
        return bool(flags.cfg or flags.hydra_help or flags.info or flags.shell_completion)

    @property
    def conf(self) -> str:
        """Folder of the primary config: conf/, or the run that is resumed."""
        return str(self.resume or (os.path.abspath(self.flags.config_path) if self.flags.config_path else CONF))

    @property
    def config_name(self) -> str:
        return "config" if self.resume else self.flags.config_name or "config"


def parse(argv: Sequence[str]) -> Command:
    """Split a command line into flags and overrides. Exits as argparse does where a flag's value is wrong."""
    flags, rest = get_args_parser().parse_known_intermixed_args(list(argv))
    overrides = [*flags.overrides, *(word for word in rest if not word.startswith("-"))]
    command = Command(flags, overrides, [word for word in rest if word.startswith("-")])
    for line in command.overrides:
        value = _value(line) if line.partition("=")[0].lstrip("+") == "resume" else None
        if value is not None:
            command.resume = Path(str(value)).absolute()
    return command


def _value(line: str) -> Any:
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(line).value()
    return None


def quote(text: object) -> str:
    """As text in Hydra's override grammar, whatever is in it."""
    return QuotedString(str(text), Quote.single).with_quotes()


def _hydra_overrides(command: Command) -> list[str]:
    """What this project always asks of Hydra, in front, so that the user's own words win."""
    return ["hydra.job.name=run", "hydra.output_subdir=null"] + (
        [f"hydra.run.dir={quote(command.resume)}"] if command.resume else []
    )


def _lines(command: Command) -> list[str]:
    """The overrides as Hydra needs them: `output_dir` is where Hydra puts a run, or a whole sweep."""
    where = "hydra.sweep.dir" if command.multirun else "hydra.run.dir"
    return [re.sub(r"^\+{0,2}output_dir(?==.)", where, line) for line in command.overrides]


# ---- composition --------------------------------------------------------------------------------------------------------
class _Unset:
    """Stands for a value that is missing or cannot be resolved: reported once, then left alone by every other check."""

    def __repr__(self) -> str:
        return "???"


Unset = _Unset()


@dataclass
class Job:
    """One job of a command: its overrides, its folder, its plain config (None where it could not be composed)."""

    lines: list[str]
    folder: Path = Path()
    cfg: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)


class Composer:
    """Composes jobs inside one Hydra session and collects problems instead of stopping at the first."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.loader = GlobalHydra.instance().config_loader()
        self.groups = [group for group in self.loader.list_groups("") if group != "hydra"]
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def options(self, group: str) -> list[str]:
        found = self.loader.get_group_options(group, ObjectType.CONFIG, config_name=None, overrides=self._search_path)
        return [option for option in found if not option.startswith("_")]

    @functools.cached_property
    def _search_path(self) -> list[str]:
        return [line for line in self.command.overrides if line.startswith("hydra.searchpath=")]

    # -- reading overrides --
    def read(self, lines: Sequence[str]) -> tuple[list[Override], list[str]]:
        """Parse each line by itself."""
        parser, good, problems = OverridesParser.create(config_loader=self.loader), [], []
        for line in lines:
            try:
                good.append(parser.parse_override(line))
            except HydraException:
                problems.append(self._unreadable(line))
        return good, problems

    def _unreadable(self, line: str) -> str:
        key, equals, value = line.partition("=")
        if not equals:
            near = [f"{group}={line}" for group in self.groups if line in self.options(group)]
            return f"{line}: is not of the form key=value: type {' or '.join(near) or f'{line}=<value>'}"
        quoted = value.replace("'", "\\'")
        return (
            f"{key}: the value {value!r} cannot be read (brackets, quotes, commas, colons and = have a meaning in values):"
            f" type \"{key}='{quoted}'\" with both kinds of quotes to pass it as text"
        )

    def check_choice(self, override: Override) -> str | None:
        """Problem of `group=option`."""
        group, value = override.key_or_group, override.value()
        if self.command.resume:
            return (
                f"{group}: resume= goes on with the saved composition, in which nothing can be chosen anew: type a key of"
                f" it, such as algorithm.lr=1e-5, or leave resume= out and type {override.input_line}"
            )
        options = self.options(group)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and str(name) not in options:
                near = difflib.get_close_matches(str(name), options, 1) or ["<option>"]
                return f"{group}: there is no option {name} (there are: {', '.join(options)}): type {group}={near[0]}"
        return None

    def check_key(self, override: Override, cfg: DictConfig) -> str | None:
        """Problem of `key=value`, seen against a config with the same choices."""
        key = override.key_or_group
        known, parent, names = _look_up(cfg, key)
        if override.is_add() and known and not isinstance(override.value(), (dict, list)):
            return f"{key}: is in the config already: type {key}={override.get_value_string()} (without +)"
        if override.is_add() or override.is_force_add() or known:
            return None
        why = f"there is no such key in {parent or 'the config'}"
        at = f"{parent}.{key[len(parent) :].lstrip('.').split('.')[0]}" if parent else key.split(".")[0]
        if parent.split(".")[0] == "trainer":
            trainer = signatures.signature(SECTIONS["trainer"][0])
            if trainer and at.rpartition(".")[2] in trainer.parameters:
                return f"{key}: {why}, but Lightning's Trainer takes it: type +{key}={override.get_value_string()}"
        value = override.get_value_string() if at == key and not override.is_delete() else "<value>"
        return signatures.unknown(at, names if parent else [*names, *self.groups], why, value)

    # -- composing --
    def settle(self, lines: Sequence[str]) -> tuple[DictConfig | None, list[str]]:
        """Compose the good overrides; the problems of the others. No config where nothing can be composed at all."""
        overrides, problems = self.read(lines)
        machinery, choices, keys = [], [], []
        for override in overrides:
            line = str(override.input_line)
            if override.is_sweep_override():
                problems.append(_sweep_without_m(override))
            elif override.is_hydra_override():
                machinery.append(line)
            elif override.key_or_group in self.groups and (problem := self.check_choice(override)):
                problems.append(problem)
            elif override.key_or_group in self.groups:
                choices.append(override)
            else:
                keys.append(override)
        problems += _chosen_twice(choices)
        chosen = {choice.get_key_element().lstrip("+"): str(choice.input_line) for choice in choices}
        base, good, more = self._compose_what_works([*machinery, *chosen.values()])
        problems += more
        if base is None:
            return None, problems
        wrong = [problem for override in keys if (problem := self.check_key(override, base))]
        right = [str(override.input_line) for override in keys if not self.check_key(override, base)]
        cfg, _, more = self._compose_what_works([*good, *right])
        return cfg, [*problems, *wrong, *more]

    def _compose_what_works(self, lines: list[str]) -> tuple[DictConfig | None, list[str], list[str]]:
        """The config, the lines in it, and a message for each line that Hydra will not have."""
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            return self.compose(lines), lines, []
        good: list[str] = []
        problems: list[str] = []
        for line in lines:
            try:
                self.compose([*good, line])
                good.append(line)
            except (HydraException, OmegaConfBaseException) as error:
                problems.append(f"{line.partition('=')[0]}: {_in_one_line(error)}: type --help to see what can be written")
        try:
            return self.compose(good), good, problems
        except (HydraException, OmegaConfBaseException) as error:
            return None, [], [f"{self.command.conf}: {_in_one_line(error)}: type --info defaults-tree to see where"]

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """A config that the caller may change."""
        key = tuple(lines)
        if key not in self._composed:
            whole = [*_hydra_overrides(self.command), *lines]
            self._composed[key] = compose(self.command.config_name, overrides=whole, return_hydra_config=True)
        return copy.deepcopy(self._composed[key])

    # -- jobs --
    def job(self, lines: list[str], number: int | None = None) -> Job:
        """Compose and check one job; `number` is its place in a sweep."""
        cfg, problems = self.settle(lines)
        if cfg is None:
            return Job(lines, problems=problems)
        folder = _place(cfg, number)
        plain, more = resolve(cfg)
        problems += more + validate(plain)
        problems += _folder_problems(folder, self.command)
        return Job(lines, folder, plain, problems)

    def sweep(self) -> tuple[list[list[str]], list[str]]:
        """The overrides of every job, expanded as Hydra's sweeper will do it."""
        master, _, problems = self._compose_what_works([line for line in _lines(self.command) if line.startswith("hydra")])
        if master is None:
            return [], problems
        sweeper = master.hydra.sweeper
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        overrides, unreadable = self.read([*params, *_lines(self.command)])
        if sweeper._target_.rpartition(".")[2] == "BasicSweeper":
            expanded = [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]
        else:  # others choose as they go: check one point of the space now, each job as it starts
            expanded = [[_first_value(override) for override in overrides]]
        return expanded, problems + unreadable


def _sweep_without_m(override: Override) -> str:
    key, value = override.get_key_element(), override.get_value_string()
    return (
        f"{key}: {value} holds several values, which means one job for each: type -m {key}={value} for that,"
        f" '{key}=[{value}]' for a list or \"{key}='{value}'\" for text"
    )


def _chosen_twice(choices: list[Override]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for choice in choices:
        lines.setdefault(choice.key_or_group, []).append(str(choice.input_line))
    return [f"{group}: is chosen twice: type {' or '.join(said)}" for group, said in lines.items() if len(said) > 1]


def _first_value(override: Override) -> str:
    """`key=value` with one value of a sweep."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return f"{key}={override.get_value_element_as_str()}"
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{key}={value.start}"
    return f"{key}={next(iter(override.sweep_string_iterator()))}"


def _look_up(cfg: DictConfig, key: str) -> tuple[bool, str, list[str]]:
    """Whether a key is there; else the deepest node above it that is, and the names in it."""
    node: Any = cfg
    path: list[str] = []
    for name in re.split(r"[.\[\]]+", key.rstrip("]")):
        names = [str(inner) for inner in node.keys()] if isinstance(node, DictConfig) and not node._is_none() else []
        if isinstance(node, ListConfig):
            names = [str(index) for index in range(len(node))]
        if name not in names:
            return False, ".".join(path), [inner for inner in names if inner != "hydra"]
        path.append(name)
        try:
            node = node[name] if isinstance(node, DictConfig) else node[int(name)]
        except OmegaConfBaseException:  # `???` or an interpolation that cannot be resolved: there, but without inside
            node = None
    return True, "", []


def _in_one_line(error: Exception) -> str:
    """A library's message without its line breaks and without the search path."""
    text = str(error) or str(error.__cause__)
    if isinstance(error, MissingConfigException):
        text = text.split("Config search path")[0]
    return " ".join(text.split()).rstrip(".:")


# ---- from OmegaConf to plain ----------------------------------------------------------------------------------------------
def _place(cfg: DictConfig, number: int | None) -> Path:
    """Give a composed config its folder, as Hydra does when it starts the job."""
    HydraConfig.instance().set_config(cfg)
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        if number is not None:
            cfg.hydra.job.id = cfg.hydra.job.num = number
        folder = Path(str(cfg.hydra.run.dir if number is None else f"{cfg.hydra.sweep.dir}/{cfg.hydra.sweep.subdir}"))
        cfg.hydra.runtime.output_dir = str(folder.absolute())
    HydraConfig.instance().set_config(cfg)
    return folder.absolute()


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Plain dicts and lists, and a message for each value that is missing or cannot be resolved."""
    problems: list[str] = []
    plain = {str(name): _plain(cfg, name, str(name), problems) for name in cfg if name != "hydra"}
    for group in MAY_BE_EMPTY & {"reward", "logger"}:
        plain[group] = plain.get(group) or {}
    return {name: value for name, value in plain.items() if value is not None or name in _schema()}, problems


def _plain(parent: DictConfig | ListConfig, name: Any, key: str, problems: list[str]) -> Any:
    if OmegaConf.is_missing(parent, name):
        problems.append(f"{key}: is required and has no default: type {key}=<value>")
        return Unset
    try:
        value = parent[name]
    except OmegaConfBaseException as error:
        reason = _in_one_line(error).split(" full_key:")[0]
        problems.append(f"{key}: {parent._get_node(name)!s} cannot be resolved ({reason}): type {key}=<value>")
        return Unset
    if isinstance(value, DictConfig):
        return {str(inner): _plain(value, inner, f"{key}.{inner}", problems) for inner in value}
    if isinstance(value, ListConfig):
        return [_plain(value, index, f"{key}.{index}", problems) for index in range(len(value))]
    return value


def _folder_problems(folder: Path, command: Command) -> Iterator[str]:
    """A folder that holds a run is only ever gone on with, and a run that is gone on with must be there."""
    if command.resume is None and jobs.is_first_process() and (folder / "config.yaml").exists():
        yield f"output_dir: {folder} holds a run already: type resume={folder} to go on with it, or output_dir=<another folder>"
    pinned = any(line.startswith("hydra.run.dir=") for line in _lines(command))
    if command.resume is None and jobs.is_launched_from_outside() and not (pinned or command.multirun):
        yield "output_dir: each process of this job would take a folder of its own: type output_dir=outputs/<name>"


def _resume_problems(command: Command) -> list[str]:
    folder = command.resume
    if folder is None:
        return []
    if command.multirun:
        return ["resume: goes on with one run, -m starts many: type resume=<run folder> without -m"]
    if not folder.is_dir():
        return [f"resume: there is no folder {folder}: type resume=<run folder>, as outputs/<date>/<time>"]
    if not (folder / "config.yaml").is_file():
        return [f"resume: {folder} holds no config.yaml, so it is no run: type resume=<run folder>"]
    if not any((folder / "checkpoints").glob("*")):
        return [
            f"resume: {folder} holds no checkpoint, it ended before the first one (checkpoint.every): type the command of"
            " that run again, with another output_dir"
        ]
    return []


# ---- preflight ------------------------------------------------------------------------------------------------------------
@dataclass
class Plan:
    """What `launch` needs: the overrides for Hydra and the folder of the run or of the sweep."""

    command: Command
    overrides: list[str]
    folder: Path
    num_jobs: int = 1


@contextlib.contextmanager
def composer(command: Command) -> Iterator[Composer]:
    """A Hydra session that leaves Hydra's globals as they were."""
    outer = HydraConfig.instance().cfg
    try:
        with initialize_config_dir(command.conf, job_name="run", version_base=VERSION_BASE):
            if command.flags.config_dir:
                command.overrides.append(f"hydra.searchpath=[{quote('file://' + os.path.abspath(command.flags.config_dir))}]")
            yield Composer(command)
    finally:
        HydraConfig.instance().cfg = outer


def preflight(command: Command) -> Plan:
    """Check everything that can be checked without importing anything heavy. ConfigError with all problems."""
    problems = [_flag_problem(flag) for flag in command.unknown_flags] + _resume_problems(command)
    if any(problem.startswith("resume:") for problem in problems):
        raise ConfigError(problems)
    if command.multirun and jobs.is_launched_from_outside():
        problems.append("-m: every process of this launch would run the whole sweep: type one launch for each job")
    with composer(command) as session:
        if command.multirun:
            plan, found = _preflight_sweep(session)
        else:
            job = session.job(_lines(command))
            pinned = f"hydra.run.dir={quote(job.folder)}"
            plan, found = Plan(command, [*_lines(command), pinned], job.folder), job.problems
    if problems or found:
        raise ConfigError([*problems, *found])
    return plan


def _flag_problem(flag: str) -> str:
    text = flag.lstrip("-")
    hint = text if "=" in text else f"{text}=<value>" if flag.startswith("--") else "--hydra-help to see the flags"
    return f"{flag}: there is no such flag; choices and keys are written without dashes: type {hint}"


def _preflight_sweep(session: Composer) -> tuple[Plan, list[str]]:
    lists, problems = session.sweep()
    found: dict[str, list[int]] = {}
    started, checked, first = time.monotonic(), 0, Path()
    for number, lines in enumerate(lists):
        if checked and time.monotonic() - started > SWEEP_BUDGET:
            print(f"checked {checked} of {len(lists)} jobs before the start; the others as each starts", file=sys.stderr)
            break
        job = session.job(lines, number)
        first = first if checked else _sweep_folder(job)
        for problem in dict.fromkeys(job.problems):
            found.setdefault(problem, []).append(number)
        checked += 1
    command = session.command
    plan = Plan(command, [*_lines(command), f"hydra.sweep.dir={quote(first)}"], first, len(lists))
    return plan, problems + [_of_jobs(problem, numbers, checked, lists) for problem, numbers in found.items()]


def _sweep_folder(job: Job) -> Path:
    """The sweep's folder, its time stamp evaluated once for all jobs."""
    return Path(str(HydraConfig.get().sweep.dir)).absolute() if job.cfg is not None else Path()


def _of_jobs(problem: str, numbers: list[int], checked: int, lists: list[list[str]]) -> str:
    if len(numbers) == checked:
        return problem
    which = ", ".join(f"{number} ({' '.join(lists[number])})" for number in numbers[:3])
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{problem}   [job {which}{more}]"


# ---- starting ---------------------------------------------------------------------------------------------------------------
def show_help(command: Command) -> str:
    """The text of `--help`, with the keys of the options that are named after it."""
    if not command.overrides:
        return manual.overview(CONF)
    try:
        return manual.details(CONF, command.overrides)
    except LookupError as error:
        word = str(error.args[0])
        options = [name for group in manual.groups(CONF) for name in (group, *manual.options(CONF, group))]
        near = difflib.get_close_matches(word.rpartition("=")[2], options, 1)
        what = f"--help {near[0]}" if near else "--help"
        raise ConfigError([f"{word}: there is no such group or option: type {what}"]) from None


def show(command: Command) -> None:
    """`--cfg`, `--info`, `--hydra-help` and `--shell-completion`, which are Hydra's."""
    extra: list[str] = []
    if command.flags.cfg:
        with composer(command) as session:
            cfg, problems = session.settle(_lines(command))
            if problems or cfg is None:
                raise ConfigError([*(_flag_problem(flag) for flag in command.unknown_flags), *problems])
            extra = [*_hydra_overrides(command), f"hydra.runtime.output_dir={quote(_place(cfg, None))}"]
    if not command.flags.shell_completion:
        command.flags.overrides = [*extra, *_lines(command)]
    _run_hydra(command.flags, get_args_parser(), _nothing, command.conf, command.config_name)


def _nothing(cfg: DictConfig) -> None:
    """Hydra asks for a task function also where it runs none."""


def launch(plan: Plan) -> Any:
    """Run the job, or the jobs of a sweep, through Hydra's launcher. The objective, or the list of objectives.

    Raises what a single job raised; UserError where jobs of a sweep failed, after all of them have run.
    """
    command, outcomes = plan.command, []
    in_sweep = command.multirun

    def job(cfg: DictConfig) -> Any:
        plain, problems = resolve(cfg)
        with _hydra_unseen() as launch_folder, contextlib.chdir(launch_folder):
            if in_sweep:
                outcome = _run_in_sweep(plain, problems)
            else:
                outcome = _caught(plain, resume=command.resume is not None)
        outcomes.append(outcome)
        return float("nan") if isinstance(outcome, BaseException) else outcome

    flags = copy.copy(command.flags)
    flags.overrides = [*_hydra_overrides(command), *plan.overrides]
    flags.run, flags.multirun, flags.config_dir = not in_sweep, in_sweep, None
    _run_hydra(flags, get_args_parser(), job, command.conf, command.config_name)
    if in_sweep:
        _report(plan)
        return outcomes
    if isinstance(outcomes[0], BaseException):
        raise outcomes[0]
    return outcomes[0]


@contextlib.contextmanager
def _hydra_unseen() -> Iterator[str]:
    """Without Hydra's global config, Lightning starts further ranks from sys.argv, which `jobs` sets to this job."""
    outer = HydraConfig.instance().cfg
    folder = HydraConfig.get().runtime.cwd
    HydraConfig.instance().cfg = None
    try:
        yield folder
    finally:
        HydraConfig.instance().cfg = outer


def _caught(cfg: dict[str, Any], *, resume: bool) -> Any:
    """The objective, or the error as a value: Hydra would print it in its own way."""
    try:
        write_config(cfg, replace=resume)
        return jobs.run_here(cfg)
    except Exception as error:
        return error


def _run_in_sweep(cfg: dict[str, Any], problems: list[str]) -> Any:
    """Like `_caught`, and the failure is told and recorded, so that the sweep can go on."""
    folder = Path(cfg["output_dir"])
    try:
        if problems := problems + validate(cfg):
            raise ConfigError(problems)
        write_config(cfg)
        apart = rules.world_size(cfg) != 1
        return jobs.run_apart(cfg) if apart else jobs.run_here(cfg)
    except (Exception, SystemExit) as error:
        jobs.record_failure(folder, error)
        text = (folder / "error.txt").read_text(encoding="utf-8")
        print(f"job {folder.name} failed: {error if isinstance(error, UserError) else text}", file=sys.stderr)
        return error


def write_config(cfg: dict[str, Any], *, replace: bool = False) -> None:
    """`config.yaml` of the run's folder: what `resume` and further ranks start from. One process of a job writes it."""
    if not jobs.is_first_process():
        return
    file = Path(cfg["output_dir"]) / "config.yaml"
    text = OmegaConf.to_yaml(OmegaConf.create(cfg))
    file.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        (part := file.with_suffix(".partial")).write_text(text, encoding="utf-8")
        part.replace(file)
        return
    try:
        with open(file, "x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise UserError(f"output_dir: {file.parent} was taken by another run: type output_dir=<another folder>") from None


def run_saved(file: Path) -> Any:
    """`run.py --job <folder>/config.yaml`: a further rank, or a job of a sweep in a process of its own."""
    cfg = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(cfg, dict)
    return jobs.run_saved({str(name): value for name, value in cfg.items()})


def _report(plan: Plan) -> None:
    """What became of a sweep; UserError where a job failed. Read from the folders: a launcher may have used processes."""
    failed = sorted(plan.folder.rglob("error.txt"))
    done = f"{plan.num_jobs - len(failed)} of {plan.num_jobs} jobs done, in {plan.folder}"
    if not failed:
        print(done, file=sys.stderr)
        return
    lines = [f"{len(failed)} of {plan.num_jobs} jobs failed ({done}):"]
    lines += [f"  {f.parent.relative_to(plan.folder)}: {f.read_text(encoding='utf-8').splitlines()[0]}  ({f})" for f in failed]
    raise UserError("\n".join(lines))


def how_to_resume(error: Interrupted) -> str:
    if any((error.folder / "checkpoints").glob("*")):
        return f"interrupted. To go on from its last checkpoint: python run.py resume={error.folder}"
    return f"interrupted before the first checkpoint (checkpoint.every); there is nothing to resume in {error.folder}"
