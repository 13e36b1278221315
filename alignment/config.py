"""Compose, check, start. Only this file and run.py know Hydra and OmegaConf; everybody else gets plain dicts.

`preflight` answers before anything heavy is imported, with every problem of the command line and of every job at once:
override grammar, choices, keys, missing values and interpolations here, the composed config in `validate.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from alignment import help as manual
from alignment import jobs, rules, signatures
from alignment.errors import ConfigError, Interrupted, UserError
from alignment.validate import CONF, MAY_BE_EMPTY, SECTIONS, SEVERAL, external_problems, validate

__all__ = [
    "build", "external_problems", "how_to_resume", "launch", "parse", "preflight", "rehearse", "run_saved", "show",
    "show_help",
]  # fmt: skip

VERSION_BASE = "1.3"
# Seconds that checking the jobs of a sweep may take; the others are checked as each starts.
SWEEP_BUDGET = 20.0
ERRORS = (HydraException, OmegaConfBaseException, ValueError)


# ---- for everybody -------------------------------------------------------------------------------------------------
def build(node: Mapping[str, Any], **passed: Any) -> Any:
    """Instantiate a node with `_target_`, every container in it a plain one, plus the arguments `passed` by code.

    `passed` does not go through Hydra, which would turn dataclass instances and lists into containers of its own. With
    `_partial_: true` the result is a partial of both.
    """
    try:
        made = instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise _underneath(error) from error
    made = functools.partial(made, **passed)
    return made if node.get("_partial_") else made()


def _underneath(error: InstantiationException) -> Exception:
    """What Hydra wrapped, where it is the user's to put right: a UserError, or a package that is not installed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return UserError(f"{str(error).splitlines()[0]} {cause}: type pip install {cause.name}")
        cause = cause.__cause__ or cause.__context__
    return error


# ---- the command line ----------------------------------------------------------------------------------------------
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

    @property
    def lines(self) -> list[str]:
        """The overrides as Hydra needs them: `output_dir` is where Hydra puts a run, or a whole sweep."""
        overrides = [with_plus(line) for line in self.overrides]
        if self.resume:
            return [*overrides, f"output_dir={quote(self.resume)}", f"hydra.run.dir={quote(self.resume)}"]
        where = "hydra.sweep.dir" if self.multirun else "hydra.run.dir"
        return [re.sub(r"^\+{0,2}output_dir(?==)", where, line) for line in overrides]

    @property
    def machinery(self) -> list[str]:
        """What this project always asks of Hydra, to stand in front so that the user's own words win."""
        extra = self.flags.config_dir
        search = [f"hydra.searchpath=[{quote('file://' + os.path.abspath(extra))}]"] if extra else []
        return ["hydra.job.name=run", "hydra.output_subdir=null", *search]


def parse(argv: Sequence[str]) -> Command:
    """Split a command line into flags and overrides. Exits as argparse does where a flag's value is wrong."""
    flags, rest = get_args_parser().parse_known_intermixed_args(list(argv))
    overrides = [*flags.overrides, *(word for word in rest if not word.startswith("-"))]
    command = Command(flags, overrides, [word for word in rest if word.startswith("-")])
    for line in overrides:
        key, _, value = line.partition("=")
        if key.lstrip("+") == "resume" and value not in ("", "null"):
            with contextlib.suppress(HydraException):
                said = OverridesParser.create().parse_override(line).value()
                value = said if isinstance(said, str) else value
            command.resume = Path(value).absolute()
    return command


# A choice that goes to a place of its own below another of the same group: `data@data.sources.chat=jsonl`.
NESTED = r"data@(data\.sources\.\w+)"


def with_plus(line: str) -> str:
    """A line as Hydra wants it where nobody need say that something is added: such a choice always is, and a table of
    names (`data.fields={prompt: text}`) may hold any. What an added key does not mean, validation says."""
    line = re.sub(rf"^\+{{0,2}}(?={NESTED}=)", "+", line)
    return re.sub(r"^(?=[\w.]+=\{)", "++", line)


def quote(text: object) -> str:
    """As text in Hydra's override grammar, whatever is in it."""
    return QuotedString(str(text), Quote.single).with_quotes()


def _line_problems(command: Command) -> list[str]:
    """What the command line alone shows to be wrong, before anything is composed."""
    problems = [_flag_problem(flag) for flag in command.unknown_flags]
    if command.multirun and jobs.is_launched_from_outside():
        problems.append("-m: every process of this launch would run the whole sweep: type one launch for each job")
    for line in command.overrides:
        if re.fullmatch(r"\+{0,2}output_dir=(null|None|)", line):
            problems.append("output_dir: a run needs a folder: type output_dir=outputs/<name>, or leave it out")
        elif command.resume and re.match(r"\+{0,2}output_dir=", line):
            problems.append(
                "output_dir: resume= goes on in the folder of its run: leave it out; type resume=<run folder>"
            )
    return problems


def _flag_problem(flag: str) -> str:
    text = flag.lstrip("-")
    hint = text if "=" in text else f"{text}=<value>" if flag.startswith("--") else "--hydra-help to see the flags"
    return f"{flag}: there is no such flag; choices and keys are written without dashes: type {hint}"


def _resume_problem(command: Command) -> str | None:
    folder = command.resume
    if folder is None:
        return None
    if command.multirun:
        return "resume: goes on with one run, -m starts many: type resume=<run folder> without -m"
    if not folder.is_dir():
        return f"resume: there is no folder {folder}: type resume=<run folder>, such as outputs/<date>/<time>"
    if not (folder / "config.yaml").is_file():
        return f"resume: {folder} holds no config.yaml, so it is no run: type resume=<run folder>"
    if not any((folder / "checkpoints").glob("*.ckpt")):
        why = "holds no checkpoint, it ended before the first one (checkpoint.every)"
        return f"resume: {folder} {why}: type the command of that run again, with another output_dir"
    return None


# ---- composition ---------------------------------------------------------------------------------------------------
@dataclass
class Job:
    """One job of a command: its folder and everything that is wrong with it."""

    folder: Path
    problems: list[str]
    cfg: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def composer(command: Command) -> Iterator[Composer]:
    """A Hydra session that leaves Hydra's globals as they were."""
    outer = HydraConfig.instance().cfg
    try:
        with initialize_config_dir(command.conf, job_name="run", version_base=VERSION_BASE):
            yield Composer(command)
    finally:
        HydraConfig.instance().cfg = outer


class Composer:
    """Composes jobs inside one Hydra session and collects problems instead of stopping at the first."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.loader = GlobalHydra.instance().config_loader()
        # A run that is resumed has folders of its own (model/), which are no groups.
        self.groups = list(manual.groups(CONF)) if command.resume else self._options("", ObjectType.GROUP)
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def _options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        search = [line for line in self.command.machinery + self.command.overrides if "hydra.searchpath=" in line]
        found = self.loader.get_group_options(group, kind, config_name=None, overrides=search)
        return [name for name in found if not name.startswith("_") and name != "hydra"]

    def settle(self, lines: Sequence[str]) -> tuple[DictConfig | None, DictConfig | None, list[str], set[str]]:
        """Compose with what is good of the overrides: the config, Hydra's own part, the problems of the rest, and the
        groups whose option is not the one that was meant.

        The choices are composed by Hydra, once for all jobs that share them; keys are then set one by one, so that a
        bad one hides no other.
        """
        overrides, problems = self.read(lines)
        choices = [override for override in overrides if override.key_or_group in self.groups]
        keys = [o for o in overrides if o not in choices and not o.is_hydra_override()]
        checked = [(choice, self._choice_problem(choice)) for choice in choices]
        problems += [problem for _, problem in checked if problem] + _chosen_twice(choices)
        unsettled = {choice.package or choice.key_or_group for choice, problem in checked if problem}
        good = {choice.get_key_element(): str(choice.input_line) for choice, problem in checked if not problem}
        machinery = [str(override.input_line) for override in overrides if override.is_hydra_override()]
        whole, more = self._compose_what_works([*machinery, *good.values()])
        problems += more
        if whole is None:
            return None, None, problems, unsettled
        cfg = OmegaConf.masked_copy(whole, [str(name) for name in whole if name != "hydra"])
        OmegaConf.set_struct(cfg, True)
        problems += _nested_elsewhere(cfg, choices)
        lost = tuple(f"{place}." for place in unsettled)
        known = [key for key in keys if not key.get_key_element().lstrip("+~").startswith(lost)]
        problems += [problem for override in known if (problem := self._set(cfg, override))]
        with read_write(whole.hydra):
            whole.hydra.job.override_dirname = _dirname(whole, [*choices, *keys])
        return cfg, whole, problems, unsettled

    # -- reading overrides --
    def read(self, lines: Sequence[str], *, sweeps: bool = False) -> tuple[list[Override], list[str]]:
        """Parse each line by itself; several values in one line are a problem unless this is a sweep."""
        parser, good, problems = OverridesParser.create(config_loader=self.loader), [], []
        for line in map(with_plus, lines):
            key, equals, _ = line.partition("=")
            if (equals or line.startswith("~")) and not re.fullmatch(r"(\+\+?|~)?\w[\w-]*([./@]\w[\w-]*)*", key):
                problems.append(f"{line}: {key!r} is no key: type a name from --cfg job, such as optimizer.betas.0=0.9")
                continue
            try:
                (override,) = parser.parse_overrides([line])
            except HydraException:
                problems.append(self._unreadable(line))
                continue
            if override.is_sweep_override() and not sweeps:
                problems.append(_sweep_without_m(override))
            else:
                good.append(override)
        return good, problems

    def _unreadable(self, line: str) -> str:
        key, equals, value = line.lstrip("+").partition("=")
        if not equals:
            near = [f"{group}={line}" for group in self.groups if line in self._options(group)]
            return f"{line}: is not of the form key=value: type {' or '.join(near) or f'{line}=<value>'}"
        quoted = value.replace("'", "\\'")
        why = "brackets, quotes, commas, colons, = and spaces mean something in a value"
        return (
            f"{key}: the value {value!r} cannot be read ({why}): type \"{key}='{quoted}'\", with both kinds of quotes"
        )

    def _choice_problem(self, override: Override) -> str | None:
        """Problem of `group=option`."""
        group, value = override.key_or_group, override.value()
        if self.command.resume:
            why = "resume= goes on with the saved composition, in which nothing can be chosen anew"
            return f"{group}: {why}: type a key of it, such as algorithm.lr=1e-5, or start a new run without resume="
        options = self._options(group)
        none = f"{group}=[]" if group in SEVERAL else f"~{group}" if group in MAY_BE_EMPTY else f"{group}=<option>"
        nested = override.package is not None and re.fullmatch(NESTED, f"{group}@{override.package}")
        if nested and (override.is_delete() or not isinstance(value, str)):
            return f"{group}@{override.package}: takes one option: type {group}@{override.package}=<option>"
        if override.package is not None and not nested:
            return f"{group}: a run has one place for it, which {override.package!r} is not: type {group}={value}"
        if override.is_delete():
            return f"{group}: is emptied in another way: type {none}" if group in SEVERAL else None
        if value is None:
            return f"{group}: null is no option (there are: {', '.join(options)}): type {none}"
        if isinstance(value, list) and len(value) > 1 and group not in SEVERAL:
            names = ",".join(map(str, value))
            return f"{group}: takes one option: type {group}={value[0]}, or -m {group}={names} for a job with each"
        for name in value if isinstance(value, list) else [value]:
            if str(name) not in options:
                near = difflib.get_close_matches(str(name), options, 1) or ["<option>"]
                return f"{group}: there is no option {name} (there are: {', '.join(options)}): type {group}={near[0]}"
        return None

    def _set(self, cfg: DictConfig, override: Override) -> str | None:
        """Apply `key=value`; the problem instead, where there is one."""
        key = override.key_or_group
        known, parent, names = _look_up(cfg, key)
        value = "" if override.is_delete() else override.get_value_string()
        if override.is_add() and known and not isinstance(override.value(), (dict, list)):
            return f"{key}: is in the config already: type {key}={value} (without +)"
        if not (known or override.is_add() or override.is_force_add()):
            return self._no_such_key(key, parent, names, value)
        if known and signatures.is_number_as_text(override.value()) and signatures.is_number(_value(cfg, key)):
            return signatures.wrong_type(key, override.value(), ["a number"])
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
        except ERRORS as error:
            return f"{key}: {_in_one_line(error)}: type --cfg job to see what is there"
        return None

    def _no_such_key(self, key: str, parent: str, names: list[str], value: str) -> str:
        why = f"there is no such key in {parent or 'the config'}"
        inner = key[len(parent) :].lstrip(".").partition(".")[0]
        at = f"{parent}.{inner}" if parent else inner
        if parent == "data.sources":
            there = f" (there are: {', '.join(names)})" if names else ""
            return f"{key}: no source is called {inner}{there}: type data@{at}=<option> to add it"
        if parent and not names:
            return f"{key}: {parent} is a value with nothing in it: type {parent}={value}"
        trainer = signatures.signature(SECTIONS["trainer"][0]) if parent == "trainer" else None
        if trainer and inner in trainer.parameters:
            return f"{key}: {why}, but Lightning's Trainer takes it: type +{key}={value}"
        return signatures.unknown(
            at, names if parent else [*names, *self.groups], why, value if at == key else "<value>"
        )

    # -- composing --
    def _compose_what_works(self, lines: list[str]) -> tuple[DictConfig | None, list[str]]:
        """The config, and a message for each line that Hydra will not have."""
        with contextlib.suppress(*ERRORS):
            return self.compose(lines), []
        good: list[str] = []
        problems: list[str] = []
        for line in lines:
            try:
                self.compose([*good, line])
                good.append(line)
            except ERRORS as error:
                problems.append(
                    f"{line.partition('=')[0]}: {_in_one_line(error)}: type --help to see what can be chosen"
                )
        try:
            return self.compose(good), problems
        except ERRORS as error:
            return None, [f"{self.command.conf}: {_in_one_line(error)}: type --info defaults-tree to see where"]

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """The whole config, Hydra's part included. Shared: only Hydra's part may be changed."""
        key = tuple(lines)
        if key not in self._composed:
            whole = [*self.command.machinery, *lines]
            self._composed[key] = compose(self.command.config_name, overrides=whole, return_hydra_config=True)
        return self._composed[key]

    # -- jobs --
    def job(self, lines: Sequence[str], number: int | None = None) -> Job:
        """Compose and check one job; `number` is its place in a sweep."""
        cfg, whole, problems, unsettled = self.settle(lines)
        if cfg is None or whole is None:
            return Job(Path(), problems)
        try:
            folder = _place(whole, number)
        except ERRORS as error:
            return Job(Path(), [*problems, f"output_dir: {_in_one_line(error)}: type output_dir=<folder>"])
        plain, more = resolve(cfg)
        return Job(
            folder,
            [*problems, *more, *validate(plain, without=unsettled), *_folder_problems(folder, self.command)],
            plain,
        )

    def sweep(self) -> tuple[list[list[str]], Path, list[str]]:
        """The overrides of every job as Hydra's sweeper will expand them, and the sweep's folder."""
        machinery, problems = self.read([line for line in self.command.lines if line.startswith("hydra")])
        master, more = self._compose_what_works([str(override.input_line) for override in machinery])
        if master is None:
            return [], Path(), problems + more
        _place(master, None)
        params = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
        keys = [line for line in self.command.lines if not line.startswith("hydra")]
        overrides, unreadable = self.read([*params, *keys], sweeps=True)
        basic = master.hydra.sweeper._target_.rpartition(".")[2] == "BasicSweeper"
        wrong = [o for o in overrides if basic and o.is_sweep_override() and not o.is_discrete_sweep()]
        overrides = [override for override in (*machinery, *overrides) if override not in wrong]
        problems += [*more, *unreadable, *map(_interval_without_optimiser, wrong)]
        if basic:
            expanded = [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]
        else:  # others choose as they go: check one point of the space now, each job as it starts
            expanded = [[_first_value(override) for override in overrides]]
        return expanded, Path(str(master.hydra.sweep.dir)).absolute(), problems

    def swept_lines(self) -> list[str]:
        """The command's overrides for Hydra's sweeper.

        Before any job, Hydra composes what is not swept, with the default option of a swept group: a key that only
        another option has is unknown to it, unless it is swept too, if only over one value.
        """
        lines = []
        for override in self.read(self.command.lines, sweeps=True)[0]:
            inner = "." in override.key_or_group and not override.is_hydra_override() and not override.is_delete()
            fixed = inner and not override.is_sweep_override()
            one = f"{override.get_key_element()}=choice({override.get_value_string()})"
            lines.append(one if fixed and not self.read([one], sweeps=True)[1] else str(override.input_line))
        return lines


def _sweep_without_m(override: Override) -> str:
    key, value = override.get_key_element(), override.get_value_string()
    if override.is_hydra_override():
        return f"{key}: {value} holds several values, but it is said once for all jobs: type {key}=<one value>"
    ways = f"type -m {key}={value} for that, '{key}=[{value}]' for a list or \"{key}='{value}'\" for text"
    return f"{key}: {value} holds several values, which means one job for each: {ways}"


def _interval_without_optimiser(override: Override) -> str:
    key, value = override.get_key_element(), override.get_value_string()
    why = "has no end of values, only sweepers that choose by themselves (hydra/sweeper=...) take it"
    return f"{key}: {value} {why}: type {key}=range(<start>,<stop>,<step>) or {key}=<value>,<value>"


def _chosen_twice(choices: list[Override]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for choice in choices:
        lines.setdefault(f"{choice.key_or_group}@{choice.package or ''}".rstrip("@"), []).append(str(choice.input_line))
    return [f"{group}: is chosen twice: type {' or '.join(said)}" for group, said in lines.items() if len(said) > 1]


def _nested_elsewhere(cfg: DictConfig, choices: list[Override]) -> list[str]:
    """Choices below one that has no place for them; a place that no option has is reported where the line is read."""
    nested = [choice for choice in choices if re.fullmatch(NESTED, f"{choice.key_or_group}@{choice.package}")]
    lines = [str(choice.input_line).lstrip("+") for choice in nested]
    if not lines or str(_value(cfg, "data._target_")).endswith(".Mix"):
        return []
    return [f"{line}: only data=mix has sources by name: type data=mix as well" for line in lines]


def _first_value(override: Override) -> str:
    """`key=value` with one value of a sweep."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return f"{key}={override.get_value_element_as_str()}"
    value = override.value()
    first = value.start if isinstance(value, IntervalSweep) else next(iter(override.sweep_string_iterator()))
    return f"{key}={first}"


def _look_up(cfg: DictConfig, key: str) -> tuple[bool, str, list[str]]:
    """Whether a key is there; else the deepest node above it that is, and the names in it."""
    node: Any = cfg
    path: list[str] = []
    for name in re.split(r"[.\[\]]+", key.rstrip("]")):
        names = [str(inner) for inner in node] if isinstance(node, DictConfig) else []
        names = [str(index) for index in range(len(node))] if isinstance(node, ListConfig) else names
        if name not in names:
            return False, ".".join(path), names
        path.append(name)
        try:
            node = node[name] if isinstance(node, DictConfig) else node[int(name)]
        except OmegaConfBaseException:  # `???` or an interpolation that leads nowhere: it is there, nothing is in it
            node = None
    return True, "", []


def _value(cfg: DictConfig, key: str) -> Any:
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.select(cfg, key, throw_on_missing=False)
    return None


def _dirname(whole: DictConfig, overrides: list[Override]) -> str:
    """Hydra's `${hydra.job.override_dirname}`, which a user's folder pattern may hold."""
    names = whole.hydra.job.config.override_dirname
    return get_overrides_dirname(overrides, names.exclude_keys, names.item_sep, names.kv_sep)


def _in_one_line(error: Exception) -> str:
    """A library's message without its line breaks and without the search path."""
    text = f"{error} {error.__cause__ or ''}".split("Config search path")[0].split("full_key:")[0]
    return " ".join(text.split()).rstrip(".:")


# ---- from OmegaConf to plain ---------------------------------------------------------------------------------------
def _place(whole: DictConfig, number: int | None) -> Path:
    """Give a composed config its folder, as Hydra does when it starts a job; `${hydra:...}` means it from now on."""
    HydraConfig.instance().set_config(whole)
    with read_write(whole.hydra), open_dict(whole.hydra):
        if number is not None:
            whole.hydra.job.id = whole.hydra.job.num = number
        sweep = whole.hydra.sweep
        folder = Path(whole.hydra.run.dir if number is None else os.path.join(sweep.dir, str(sweep.subdir))).absolute()
        whole.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(whole)
    return folder


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Plain dicts and lists, and a message for each value that is missing or cannot be resolved."""
    problems: list[str] = []
    plain = {str(name): _plain(cfg, name, str(name), problems) for name in cfg}
    return plain | {group: {} for group in sorted(SEVERAL) if not plain.get(group)}, problems


def _plain(parent: DictConfig | ListConfig, name: Any, key: str, problems: list[str]) -> Any:
    if OmegaConf.is_missing(parent, name):
        problems.append(f"{key}: is required and has no default: type {key}=<value>")
        return signatures.UNSET
    try:
        value = parent[name]
    except OmegaConfBaseException as error:
        reason = _in_one_line(error)
        problems.append(f"{key}: {parent._get_node(name)} cannot be resolved ({reason}): type {key}=<value>")
        return signatures.UNSET
    if isinstance(value, DictConfig):
        return {str(inner): _plain(value, inner, f"{key}.{inner}", problems) for inner in value}
    if isinstance(value, ListConfig):
        return [_plain(value, index, f"{key}.{index}", problems) for index in range(len(value))]
    return value


def _folder_problems(folder: Path, command: Command) -> Iterator[str]:
    """A folder that holds a run is only ever gone on with; several processes need one folder that all of them know."""
    if command.resume or not jobs.is_first_process():
        return
    if (folder / "config.yaml").exists() and command.multirun:
        sweep = HydraConfig.get().sweep.dir
        yield f"output_dir: {sweep} holds jobs of a sweep already: type output_dir=<another folder>"
    elif (folder / "config.yaml").exists():
        ways = "type output_dir=<another folder>"
        if any((folder / "checkpoints").glob("*.ckpt")):
            ways = f"type resume={folder} to go on with it, or output_dir=<another folder>"
        yield f"output_dir: {folder} holds a run already: {ways}"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        yield f"output_dir: nothing can be written into {there}: type output_dir=<a folder that you can write into>"
    if jobs.is_launched_from_outside() and not any(line.startswith("hydra.run.dir=") for line in command.lines):
        yield "output_dir: each process of this launch would take a folder of its own: type output_dir=outputs/<name>"


# ---- preflight -----------------------------------------------------------------------------------------------------
@dataclass
class Plan:
    """What `launch` needs: the overrides for Hydra, and the folder of the run or of the sweep, its time stamp fixed."""

    command: Command
    overrides: list[str]
    folder: Path
    num_jobs: int = 1
    # Of every job that was checked, its words and its config.
    jobs: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)


def preflight(command: Command) -> Plan:
    """Check everything that can be checked without importing anything heavy. ConfigError with all problems."""
    problems = _line_problems(command)
    if problem := _resume_problem(command):
        raise ConfigError([*problems, problem])
    with composer(command) as session:
        if command.multirun:
            plan, found = _preflight_sweep(session)
        else:
            job = session.job(command.lines)
            overrides, found = [*command.lines, f"hydra.run.dir={quote(job.folder)}"], job.problems
            plan = Plan(command, overrides, job.folder, jobs=[(command.lines, job.cfg)])
    if problems or found:
        raise ConfigError(list(dict.fromkeys([*problems, *found])))
    return plan


def _preflight_sweep(session: Composer) -> tuple[Plan, list[str]]:
    lists, folder, problems = session.sweep()
    found: dict[str, list[int]] = {}
    started, checked = time.monotonic(), []
    for number, lines in enumerate(lists):
        if checked and time.monotonic() - started > SWEEP_BUDGET:
            print(
                f"checked {len(checked)} of {len(lists)} jobs before the start, the others as each starts",
                file=sys.stderr,
            )
            break
        job = session.job([*lines, f"hydra.sweep.dir={quote(folder)}"], number)
        for problem in dict.fromkeys(job.problems):
            found.setdefault(problem, []).append(number)
        checked.append((lines, job.cfg))
    overrides = [*session.swept_lines(), f"hydra.sweep.dir={quote(folder)}"]
    plan = Plan(session.command, overrides, folder, len(lists), checked)
    return plan, problems + [_of_jobs(problem, numbers, plan) for problem, numbers in found.items()]


def _of_jobs(problem: str, numbers: list[int], plan: Plan) -> str:
    """A problem with the jobs that have it, where others do not."""
    if len(numbers) == len(plan.jobs):
        return problem
    words = [[line for line in plan.jobs[number][0] if not line.startswith("hydra.")] for number in numbers[:2]]
    which = [f"job {number} ({' '.join(line)})" for number, line in zip(numbers, words, strict=False)]
    more = [f"{len(numbers) - 2} more"] if len(numbers) > 2 else []
    return f"[{', '.join(which + more)}] {problem}"


def rehearse(plan: Plan) -> Plan:
    """Let the task of every job say what its parts refuse when they are made. ConfigError with all of it.

    What is heavy is imported by now, as the run needs it anyway; still no weight is loaded and no row is read.
    """
    found: dict[str, list[int]] = {}
    known: dict[str, list[str]] = {}
    for number, (_, cfg) in enumerate(plan.jobs):
        key = json.dumps(
            {name: value for name, value in cfg.items() if name not in ("seed", "output_dir")}, default=str
        )
        if key not in known:
            known[key] = jobs.rehearse(cfg)
        for problem in known[key]:
            found.setdefault(problem, []).append(number)
    if found:
        raise ConfigError([_of_jobs(problem, numbers, plan) for problem, numbers in found.items()])
    return plan


# ---- showing -------------------------------------------------------------------------------------------------------
def show_help(command: Command) -> str:
    """The text of `--help`, or of the groups and options that are named after it."""
    if not command.overrides:
        return manual.overview(CONF)
    try:
        return manual.details(CONF, command.overrides)
    except LookupError as error:
        word = str(error.args[0])
        group, _, option = word.rpartition("=")
        groups = [group] if group in manual.groups(CONF) else list(manual.groups(CONF))
        names = [name for known in groups for name in ([] if group else [known]) + list(manual.options(CONF, known))]
        near = difflib.get_close_matches(option, names, 1) or ([group] if group in groups else [])
        raise ConfigError([f"{word}: there is no such group or option: type --help {''.join(near)}".rstrip()]) from None


def show(command: Command) -> None:
    """`--cfg`, `--info`, `--hydra-help` and `--shell-completion`, which are Hydra's."""
    flags = command.flags
    flags.overrides = [] if flags.hydra_help or flags.shell_completion else [*command.machinery]
    if flags.cfg:
        with composer(command) as session:
            _, whole, problems, _ = session.settle(command.lines)
            problems += _line_problems(command)
            if problems or whole is None:
                raise ConfigError(problems)
            flags.overrides.append(f"hydra.runtime.output_dir={quote(_place(whole, None))}")
    flags.overrides += command.overrides if flags.shell_completion else command.lines
    flags.config_dir = None if flags.cfg or flags.info else flags.config_dir
    _run_hydra(flags, get_args_parser(), _nothing, command.conf, command.config_name)


def _nothing(cfg: DictConfig) -> None:
    """Hydra asks for a task function also where it runs none."""


# ---- starting ------------------------------------------------------------------------------------------------------
def launch(plan: Plan) -> Any:
    """Run the job, or the jobs of a sweep, through Hydra's launcher. The objective, or the list of objectives.

    Raises what a single job raised; UserError where jobs of a sweep failed, after all of them have run.
    """
    command, outcomes = plan.command, []

    def job(cfg: DictConfig) -> Any:
        plain, problems = resolve(cfg)
        with _hydra_unseen() as launch_folder, contextlib.chdir(launch_folder):
            outcome = _run_in_sweep(plain, problems) if command.multirun else _run_alone(plain, command)
        outcomes.append(outcome)
        return float("nan") if isinstance(outcome, BaseException) else outcome

    flags = copy.copy(command.flags)
    flags.overrides = [*command.machinery, *plan.overrides]
    flags.run, flags.multirun, flags.config_dir = not command.multirun, command.multirun, None
    _run_hydra(flags, get_args_parser(), job, command.conf, command.config_name)
    if command.multirun:
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


def _run_alone(cfg: dict[str, Any], command: Command) -> Any:
    """The objective, or the error as a value: Hydra would print it in its own way."""
    folder = Path(cfg["output_dir"])
    try:
        if command.resume is None:  # a run that goes on writes it once it is known to go on
            write_config(cfg)
        (folder / "error.txt").unlink(missing_ok=True)  # of the attempt that is resumed
    except Exception as error:
        return error
    try:
        return jobs.run_here(cfg)
    except Exception as error:
        if jobs.is_first_process():
            jobs.record_failure(folder, error)
        return error


def _run_in_sweep(cfg: dict[str, Any], problems: list[str]) -> Any:
    """Like `_run_alone`, and a failure is told and recorded at once, so that the sweep can go on."""
    folder = Path(cfg["output_dir"])
    try:
        if problems := problems + validate(cfg) or jobs.rehearse(cfg):
            raise ConfigError(problems)
        write_config(cfg)
        return jobs.run_here(cfg) if rules.world_size(cfg) == 1 else jobs.run_apart(cfg)
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
        raise UserError(
            f"output_dir: {file.parent} was taken by another run: type output_dir=<another folder>"
        ) from None


def run_saved(file: Path) -> Any:
    """`run.py --job <folder>/config.yaml`: a further rank, or a job of a sweep in a process of its own."""
    cfg = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(cfg, dict)
    return jobs.run_saved({str(name): value for name, value in cfg.items()})


def _report(plan: Plan) -> None:
    """What became of a sweep; UserError where a job failed. Read from the folders: launchers may use processes."""
    failed = sorted(plan.folder.rglob("error.txt"))
    if not failed:
        print(f"{plan.num_jobs} jobs done, in {plan.folder}", file=sys.stderr)
        return
    lines = [f"{len(failed)} of {plan.num_jobs} jobs failed, the others are done, in {plan.folder}:"]
    for file in failed:
        reason = file.read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  {file.parent.relative_to(plan.folder)}: {reason}  (traceback: {file})")
    raise UserError("\n".join(lines))


def how_to_resume(error: Interrupted) -> str:
    if (error.folder / "pipeline.json").is_file():
        return f"interrupted. To go on with the stage that was cut off: python run.py resume={error.folder}"
    if (error.folder / "sweep.json").is_file():
        return f"interrupted. To go on with the trial that was cut off: python run.py resume={error.folder}"
    if any((error.folder / "checkpoints").glob("*.ckpt")):
        return f"interrupted. To go on from its last checkpoint: python run.py resume={error.folder}"
    return f"interrupted before the first checkpoint (checkpoint.every): there is nothing to resume in {error.folder}"
