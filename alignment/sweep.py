"""`task=sweep sweep=<file>`: the trials of a wandb sweep file, one after another, without any server.

Every trial is a run of its own in `<folder>/<number>`, started with the words that `wandb agent` would type. The same
command again goes on: what is done stays. Knows nothing of Hydra and builds nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment import config, jobs, rules
from alignment.errors import ConfigError, Interrupted, UserError

RECORD = "sweep.json"
# Keys of a sweep file: those that are read, and those that say something to wandb's server alone.
READ = ("program", "command", "method", "metric", "parameters", "run_cap")
OF_THE_SERVER = ("name", "description", "project", "entity")
OPTIONS = ("sweep.count", "sweep.seed", "sweep.retry")
Start = Callable[[Sequence[str]], Any]


class Loader(yaml.SafeLoader):
    """YAML in which 5e-7 is a number, as in YAML 1.2 and in Hydra; PyYAML takes it for text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


@dataclass
class Trial:
    """One run of a sweep: the words that start it, and where it goes."""

    words: list[str]
    folder: Path

    @property
    def done(self) -> bool:
        return not self.failed and any((self.folder / name).is_file() for name in ("summary.json", "objective.json"))

    @property
    def failed(self) -> bool:
        return (self.folder / "error.txt").is_file()


@dataclass
class Sweep:
    """What was asked for: the sweep file, the words typed besides, and the trials that follow from both."""

    file: Path
    folder: Path
    spec: dict[str, Any]
    flags: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    count: int | None = None
    seed: int = 0
    retry: bool = False
    trials: list[Trial] = field(default_factory=list)

    def save(self) -> None:
        """What `resume` goes on from, the content of the file included."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {name: getattr(self, name) for name in ("spec", "flags", "typed", "count", "seed")}
        record |= {"file": str(self.file), "trials": [trial.words for trial in self.trials]}
        (part := self.folder / f"{RECORD}.partial").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        part.replace(self.folder / RECORD)


def is_asked(argv: Sequence[str]) -> bool:
    """Whether a command line starts a sweep file, or goes on with one."""
    return any(re.match(r"sweep=|task=sweep$", word) for word in argv) or _resumed(argv) is not None


def run(argv: Sequence[str], start: Start) -> dict[str, Any]:
    """Run every trial that is not done; returns how many are, and the best. `start` runs a command line.

    All trials are checked before the first one starts: ConfigError with every problem. A trial that fails leaves its
    error.txt and the others go on; UserError at the end.
    """
    folder = _resumed(argv)
    sweep = _loaded(folder, argv) if folder else _typed(argv)
    waiting = [trial for trial in sweep.trials if not trial.done and (sweep.retry or not trial.failed)]
    _preflight(sweep, waiting)
    sweep.save()
    for number, trial in enumerate(sweep.trials):
        if trial in waiting:
            print(f"[{number + 1}/{len(sweep.trials)}] {' '.join(trial.words)}", flush=True)
            _run_trial(sweep, trial, start)
    return _told(sweep)


# ---- what is asked -------------------------------------------------------------------------------------------------
def _resumed(argv: Sequence[str]) -> Path | None:
    value = next((word.partition("=")[2] for word in reversed(argv) if re.match(r"\+*resume=", word)), "")
    return Path(value).absolute() if value and (Path(value) / RECORD).is_file() else None


def _loaded(folder: Path, argv: Sequence[str]) -> Sweep:
    saved = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    words = [word for word in argv if not re.match(r"\+*resume=|task=sweep$", word)]
    if more := [word for word in words if word.partition("=")[0] not in OPTIONS]:
        why = f"a sweep goes on as it was started: type resume={folder} alone, or with {', '.join(OPTIONS)}"
        raise ConfigError([f"{more[0]}: {why}"])
    before = [f"sweep.seed={saved['seed']}", *([f"sweep.count={saved['count']}"] if saved["count"] else [])]
    sweep = Sweep(Path(saved["file"]), folder, saved["spec"], saved["flags"], saved["typed"])
    return _with_trials(sweep, [*before, *words])


def _typed(argv: Sequence[str]) -> Sweep:
    flags, words = _flags(argv)
    own = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if not own.get("sweep"):
        raise ConfigError(["sweep: which one? type sweep=<file>, such as sweep=sweeps/dpo_beta.yaml"])
    file = Path(own["sweep"])
    folder = Path(own.get("output_dir") or f"multirun/{file.stem}").absolute()
    typed = [word for word in words if word.partition("=")[0] not in ("sweep", "task", "output_dir", *OPTIONS)]
    typed += [word for word in words if word.startswith("task=") and word != "task=sweep"]
    sweep = _with_trials(Sweep(file.absolute(), folder, _read(file), flags, typed), words)
    if (folder / RECORD).is_file():
        before = json.loads((folder / RECORD).read_text(encoding="utf-8"))["trials"]
        if any(old != new.words for old, new in zip(before, sweep.trials, strict=False)):
            raise ConfigError([f"output_dir: {folder} holds a sweep with other trials: type another output_dir"])
        if len(before) > len(sweep.trials):
            raise ConfigError([f"sweep.count: {folder} holds {len(before)} trials: type sweep.count={len(before)}"])
    return sweep


def _flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the other words."""
    flags, words, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--config-dir", "-cd") and rest:
            flags += [word, rest.pop(0)]
        elif word.startswith("-"):
            raise ConfigError([f"{word}: the sweep file says what is varied: leave {word} out"])
        else:
            words.append(word)
    return flags, words


def _read(file: Path) -> dict[str, Any]:
    """The sweep file. ConfigError with everything in it that cannot be done here."""
    if not file.is_file():
        raise ConfigError([f"sweep: there is no file {file}: type sweep=<file>, such as sweep=sweeps/dpo_beta.yaml"])
    try:
        spec = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"sweep: {file} is no yaml ({' '.join(str(error).split())}): mend it"]) from None
    if not isinstance(spec, dict) or not isinstance(spec.get("parameters"), dict) or not spec["parameters"]:
        raise ConfigError([f"sweep: {file} has no parameters: type parameters: {{seed: {{values: [1, 2, 3]}}}}"])
    problems = [f"sweep: {file}: {problem}" for problem in _file_problems(spec)]
    if problems:
        raise ConfigError(problems)
    return spec


def _file_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    for key in spec:
        if key not in (*READ, *OF_THE_SERVER):
            yield f"{key} is not done here: leave it out, or type wandb sweep <file>"
    if spec.get("method") not in ("grid", "random"):
        why = "chooses from earlier results, which is left to wandb's server" if spec.get("method") == "bayes" else ""
        yield f"method {spec.get('method')} {why or 'is not known'}: type method: grid or method: random"
    if Path(str(spec.get("program"))).name != jobs.ENTRY.name:
        yield f"program is {spec.get('program')}: type program: {jobs.ENTRY.name}"
    command = spec.get("command")
    if not isinstance(command, list) or "${program}" not in command or "${args_no_hyphens}" not in command:
        yield 'words are written without dashes: type command: ["${env}", python, "${program}", "${args_no_hyphens}"]'
    for name, given in _parameters(spec["parameters"]):
        yield from (f"{name}: {problem}" for problem in _parameter_problems(given, spec.get("method") == "grid"))


def _parameters(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name -> what is said of it; nested `parameters` are opened."""
    for name, inner in given.items():
        if isinstance(inner, dict) and isinstance(inner.get("parameters"), dict):
            yield from _parameters(inner["parameters"], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


# ---- values --------------------------------------------------------------------------------------------------------
# What each distribution of wandb needs; `q_` before one of the continuous ones asks for `q` as well.
NEEDS = {"constant": ("value",), "categorical": ("values",), "int_uniform": ("min", "max"), "uniform": ("min", "max")}
NEEDS |= {"log_uniform": ("min", "max"), "log_uniform_values": ("min", "max")}
NEEDS |= {"normal": ("mu", "sigma"), "log_normal": ("mu", "sigma")}
CONTINUOUS = ("uniform", "log_uniform", "log_uniform_values", "normal", "log_normal")
NEEDS |= {f"q_{name}": (*NEEDS[name], "q") for name in CONTINUOUS}


def _distribution(given: Mapping[str, Any]) -> str:
    """As wandb infers it where it is not named: whole bounds mean whole numbers."""
    if "distribution" in given:
        return str(given["distribution"])
    if "value" in given or "values" in given:
        return "constant" if "value" in given else "categorical"
    return "int_uniform" if all(type(given.get(end)) is int for end in ("min", "max")) else "uniform"


def _parameter_problems(given: Any, grid: bool) -> Iterator[str]:
    if not isinstance(given, dict):
        yield f"{given!r} is no parameter: type value: {given}"
        return
    kind = _distribution(given)
    if kind not in NEEDS:
        yield f"there is no distribution {kind} (there are: {', '.join(NEEDS)}): type one of them"
        return
    optional = ("distribution", *(["probabilities"] if kind == "categorical" else []))
    yield from (f"{key} is missing: type {key}: <value>" for key in NEEDS[kind] if key not in given)
    yield from (f"{key} means nothing to {kind}: leave it out" for key in given if key not in (*NEEDS[kind], *optional))
    if grid and kind not in ("constant", "categorical", "int_uniform"):
        yield f"{kind} has no end of values: type values: [...] or method: random"
    yield from _number_problems(given, kind)


def _number_problems(given: Mapping[str, Any], kind: str) -> Iterator[str]:
    values, shares = given.get("values"), given.get("probabilities")
    if kind == "categorical" and "values" in given and (not isinstance(values, list) or not values):
        yield "values is no list: type values: [<value>, <value>]"
    elif shares is not None and isinstance(values, list):
        fine = isinstance(shares, list) and all(type(one) in (int, float) and one >= 0 for one in shares)
        if not fine or len(shares) != len(values) or not math.isclose(sum(shares), 1):
            yield f"probabilities are not {len(values)} numbers with the sum 1: type one for each value"
    words = [key for key in NEEDS[kind] if key not in ("value", "values") and key in given]
    wrong = [key for key in words if type(given[key]) not in ((int,) if kind == "int_uniform" else (int, float))]
    yield from (f"{key} is {given[key]!r}, no number: type {key}: <number>" for key in wrong)
    if wrong or len(words) < len(NEEDS[kind]):
        return
    if "min" in words and given["min"] > given["max"]:
        yield f"min {given['min']} is above max {given['max']}: type them the other way round"
    if "values" in kind and given["min"] <= 0:
        yield f"min {given['min']} has no logarithm: type min: <number above 0>"
    yield from (
        f"{key} is {given[key]}: type {key}: <number above 0>" for key in ("q", "sigma") if given.get(key, 1) <= 0
    )


def _draw(given: Mapping[str, Any], generator: random.Random) -> Any:
    """One value; `log_uniform` has the logarithms of its bounds, `log_uniform_values` the bounds, as in wandb."""
    kind = _distribution(given)
    if kind in ("constant", "categorical"):
        values = [given["value"]] if kind == "constant" else given["values"]
        return generator.choices(values, given.get("probabilities"))[0]
    if kind == "int_uniform":
        return generator.randint(given["min"], given["max"])
    plain = kind.removeprefix("q_")
    if "normal" in plain:
        value = generator.gauss(given["mu"], given["sigma"])
    else:
        low, high = given["min"], given["max"]
        if plain.endswith("_values"):
            low, high = math.log(low), math.log(high)
        value = generator.uniform(low, high)
    if plain.startswith("log_"):
        value = math.exp(value)
    if plain.endswith("_values"):  # the way there and back may leave the bounds by one bit
        value = min(max(value, given["min"]), given["max"])
    return value if kind == plain else round(value / given["q"]) * given["q"]


def points(spec: Mapping[str, Any], count: int | None, seed: int) -> list[dict[str, Any]]:
    """The values of every trial. A random trial depends on the seed and its number alone: more can be asked for."""
    given = dict(_parameters(spec["parameters"]))
    if spec["method"] == "random":
        drawn = ((random.Random(f"{seed} {number}"), number) for number in range(count or 0))
        return [{name: _draw(one, generator) for name, one in given.items()} for generator, _ in drawn]
    levels = [_levels(one) for one in given.values()]
    return [dict(zip(given, point, strict=True)) for point in itertools.islice(itertools.product(*levels), count)]


def _levels(given: Mapping[str, Any]) -> Sequence[Any]:
    if _distribution(given) == "int_uniform":
        return range(given["min"], given["max"] + 1)
    return [given["value"]] if "value" in given else given["values"]


def as_word(value: Any) -> str:
    """A value in Hydra's grammar that is read back with the type it has: '1' stays text, 5e-7 a number."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_word(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (int, float)):
        return repr(value)
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", str(value)) and str(value).lower() not in (
        "true", "false", "null", "none", "inf", "nan",
    )  # fmt: skip
    return str(value) if plain else config.quote(value)


# ---- trials --------------------------------------------------------------------------------------------------------
def _with_trials(sweep: Sweep, words: Sequence[str]) -> Sweep:
    """Read sweep.count, sweep.seed and sweep.retry, and make the trials."""
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.partition("=")[0] in OPTIONS}
    for key in ("sweep.count", "sweep.seed"):
        if key in given and not re.fullmatch(r"[1-9]\d*" if key == "sweep.count" else r"\d+", given[key]):
            raise ConfigError([f"{key}: {given.get(key)} is no number of that kind: type {key}=10"])
    if (retry := given.get("sweep.retry", "false")) not in ("true", "false"):
        raise ConfigError([f"sweep.retry: {retry} is not true or false: type sweep.retry=true"])
    limit = given.get("sweep.count") or sweep.spec.get("run_cap")
    if limit is None and sweep.spec["method"] == "random":
        raise ConfigError(["sweep.count: a random search has no end: type sweep.count=20, or run_cap: 20 in the file"])
    sweep.count, sweep.seed = int(limit) if limit is not None else None, int(given.get("sweep.seed", 0))
    sweep.retry = retry == "true"
    varied = {name for name, one in _parameters(sweep.spec["parameters"]) if _distribution(one) != "constant"}
    keys = {word.partition("=")[0].lstrip("+~"): word for word in sweep.typed}
    if twice := sorted(varied & set(keys)):
        raise ConfigError(
            [f"{key}: is varied by the sweep: leave {keys[key]} out, or change the file" for key in twice]
        )
    for number, point in enumerate(points(sweep.spec, sweep.count, sweep.seed)):
        sweep.trials.append(Trial(_words(sweep, point, set(keys)), sweep.folder / str(number)))
    return sweep


def _words(sweep: Sweep, point: Mapping[str, Any], typed: set[str]) -> list[str]:
    """What follows `run.py` in the command that the file asks for, then what was typed, which wins."""
    command = sweep.spec["command"]
    words: list[str] = []
    for word in command[command.index("${program}") + 1 :]:
        own = [f"{name}={as_word(value)}" for name, value in point.items()]
        words += own if word == "${args_no_hyphens}" else [str(word)]
    return [*(word for word in words if word.partition("=")[0].lstrip("+~") not in typed), *sweep.typed]


def _preflight(sweep: Sweep, waiting: Sequence[Trial]) -> None:
    """ConfigError with the problems of every trial that is to start, what its parts refuse included."""
    fresh = [trial for trial in waiting if not (trial.folder / "config.yaml").exists()]
    found: dict[str, list[str]] = {}
    plan = config.Plan(config.parse(sweep.flags), [], sweep.folder, len(fresh))
    with config.composer(plan.command) as session:
        for trial in fresh:
            job = session.job([*trial.words, f"hydra.run.dir={config.quote(trial.folder)}"])
            for problem in job.problems:
                found.setdefault(problem, []).append(trial.folder.name)
            plan.jobs.append((trial.words, job.cfg))
    if found:
        every = len(fresh)
        which = {text: "" if len(names) == every else f"[trial {', '.join(names)}] " for text, names in found.items()}
        raise ConfigError([f"{which[text]}{text}" for text in found])
    config.rehearse(plan)


def _run_trial(sweep: Sweep, trial: Trial, start: Start) -> None:
    """Start it, or go on from its last checkpoint. What fails leaves error.txt, and the sweep goes on."""
    going_on = any((trial.folder / "checkpoints").glob("*.ckpt"))
    if not going_on and trial.folder.exists():
        shutil.rmtree(trial.folder)  # there is nothing to go on from
    words = [f"resume={trial.folder}"] if going_on else [*trial.words, f"output_dir={config.quote(trial.folder)}"]
    try:
        plan = config.preflight(config.parse([*sweep.flags, *words]))
        if rules.world_size(plan.jobs[0][1]) == 1:
            objective = start([*sweep.flags, *words])
        else:  # when one of several ranks dies, Lightning kills the process that started them
            done = subprocess.run([sys.executable, str(jobs.ENTRY), *sweep.flags, *words])
            if done.returncode == 130:
                raise Interrupted(trial.folder)
            if done.returncode:
                raise UserError(f"the trial's process ended with code {done.returncode}; what it said is above")
            objective = {}
    except KeyboardInterrupt:
        raise Interrupted(sweep.folder) from None
    except (Exception, SystemExit) as error:
        trial.folder.mkdir(parents=True, exist_ok=True)
        jobs.record_failure(trial.folder, error)
        print(f"trial {trial.folder.name} failed: {error}", file=sys.stderr)
        return
    text = json.dumps(objective, default=str)
    (trial.folder / "objective.json").write_text(text, encoding="utf-8")


def _told(sweep: Sweep) -> dict[str, Any]:
    """Say what became of the trials. UserError where one failed."""
    failed = [trial for trial in sweep.trials if trial.failed]
    best = _best(sweep)
    if best:
        value, trial = best
        print(f"best {sweep.spec['metric']['name']}: {value:.4g}, trial {trial.folder.name}: {' '.join(trial.words)}")
    if failed:
        lines = [f"{len(failed)} of {len(sweep.trials)} trials failed, the others are done, in {sweep.folder}:"]
        for trial in failed:
            reason = (trial.folder / "error.txt").read_text(encoding="utf-8").splitlines()[0]
            lines.append(f"  {trial.folder.name}: {reason}")
        raise UserError("\n".join([*lines, f"to try them again: python run.py resume={sweep.folder} sweep.retry=true"]))
    print(f"{len(sweep.trials)} trials done; to compare them: python run.py task=report runs={sweep.folder}")
    return {
        "num_trials": len(sweep.trials),
        "best": best[1].words if best else None,
        "output_dir": str(sweep.folder),
    }


def _best(sweep: Sweep) -> tuple[float, Trial] | None:
    """The trial whose summary has the best value of the file's `metric`."""
    metric = sweep.spec.get("metric") or {}
    measured = []
    for trial in sweep.trials:
        if trial.done:
            file = next(
                trial.folder / name for name in ("summary.json", "objective.json") if (trial.folder / name).exists()
            )
            value = (json.loads(file.read_text(encoding="utf-8")) or {}).get(metric.get("name"))
            measured += [(value, trial)] if isinstance(value, (int, float)) else []
    choose = max if metric.get("goal") == "maximize" else min
    return choose(measured, key=lambda pair: pair[0]) if measured else None
