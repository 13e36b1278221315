"""`pipeline=<name>`: stages, each a run that starts from what earlier ones made, in one folder.

A stage is nothing but the words of a command line, in conf/pipeline/<name>.yaml; `{sft}` in them stands for the folder
of the stage called sft. What is typed besides goes to every stage, `pipeline.sft.<word>` to that one. Knows nothing of
Hydra and builds nothing: every stage is started like a run of its own.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from alignment import config
from alignment.errors import ConfigError, Interrupted, UserError

CONF = Path(__file__).resolve().parent.parent / "conf"
RECORD = "pipeline.json"
Start = Callable[[Sequence[str]], Any]


@dataclass
class Stage:
    """One run of a pipeline: its name, the words that start it, and where it goes."""

    name: str
    words: list[str]
    folder: Path

    @property
    def done(self) -> bool:
        """A run writes its summary last."""
        return (self.folder / "summary.json").is_file()


@dataclass
class Pipeline:
    """What was asked for. `flags` (--config-dir and the like) go to every stage."""

    name: str
    folder: Path
    about: str = ""
    full_scale: str = ""
    flags: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def save(self) -> None:
        """What `resume` goes on from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), default=str, indent=2)
        (part := self.folder / f"{RECORD}.partial").write_text(text + "\n", encoding="utf-8")
        part.replace(self.folder / RECORD)


def is_asked(argv: Sequence[str]) -> bool:
    """Whether a command line starts a pipeline, or goes on with one."""
    return any(word.startswith("pipeline=") for word in argv) or _resumed(argv) is not None


def run(argv: Sequence[str], start: Start) -> dict[str, Any]:
    """Start every stage that is not done; returns the last metrics of each. `start` runs a command line.

    All stages are checked before the first one starts: ConfigError with every problem. A run that was interrupted goes
    on with `resume=<folder>`: what is done stays, the stage that was cut off goes on from its last checkpoint.
    """
    folder = _resumed(argv)
    pipeline = _loaded(folder, argv) if folder else _typed(argv)
    if "--help" in argv or "-h" in argv:
        return {"shown": print(_shown(pipeline))}
    _preflight(pipeline)
    pipeline.save()
    results: dict[str, Any] = {}
    for number, stage in enumerate(pipeline.stages, 1):
        head = f"[{number}/{len(pipeline.stages)}] {stage.name}"
        print(f"{head}: {'done before' if stage.done else ' '.join(stage.words)}", flush=True)
        if not stage.done:
            _run_stage(pipeline, stage, start)
        results[stage.name] = json.loads((stage.folder / "summary.json").read_text(encoding="utf-8"))
    from alignment.experiment.stages import write_stages  # draws: too heavy for a command that is refused

    report = write_stages(pipeline.folder, {s.name: (s.words, s.folder) for s in pipeline.stages}, pipeline.full_scale)
    print(
        report.read_text(encoding="utf-8").partition("\n## ")[0]
        + f"\nreport.md and stages.png are in {pipeline.folder}"
    )
    return results | {"output_dir": str(pipeline.folder)}


# ---- what is asked -------------------------------------------------------------------------------------------------
def _value(argv: Sequence[str], key: str) -> str | None:
    found = [word.partition("=")[2] for word in argv if word.partition("=")[0].lstrip("+") == key]
    return found[-1] if found else None


def _resumed(argv: Sequence[str]) -> Path | None:
    """The folder of a pipeline that goes on."""
    value = _value(argv, "resume")
    return Path(value).absolute() if value and (Path(value) / RECORD).is_file() else None


def _loaded(folder: Path, argv: Sequence[str]) -> Pipeline:
    if more := [word for word in argv if not re.match(r"\+*resume=", word)]:
        raise ConfigError(
            [f"{more[0]}: a pipeline goes on as it was started: type resume={folder} alone, or start a new one"]
        )
    saved = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    moved = Path(saved["folder"])  # the folder may have been moved since
    stages = [
        Stage(
            stage["name"],
            [word.replace(str(moved), str(folder)) for word in stage["words"]],
            folder / Path(stage["folder"]).name,
        )
        for stage in saved.pop("stages")
    ]
    return Pipeline(**saved | {"folder": folder, "stages": stages})


def _typed(argv: Sequence[str]) -> Pipeline:
    flags, words = _flags(argv)
    name = str(_value(words, "pipeline"))
    file = _file(name, flags)
    plan = yaml.safe_load(file.read_text(encoding="utf-8"))
    output = _value(words, "output_dir") or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S-%f")
    folder = Path(output).absolute()
    if (folder / RECORD).exists():
        raise ConfigError(
            [f"output_dir: {folder} holds a pipeline already: type resume={folder}, or another output_dir"]
        )
    about = next((line.lstrip("# ").strip() for line in file.read_text(encoding="utf-8").splitlines()), "")
    pipeline = Pipeline(name, folder, about, plan.get("full_scale", ""), flags)
    names = list(plan["stages"])
    shared, own = _split(words, names)
    folders = {stage: folder / f"{number}_{stage}" for number, stage in enumerate(names, 1)}
    for stage in names:
        typed = [*shared, *own.get(stage, [])]
        words = _merged(_merged(plan.get("shared", []), plan["stages"][stage]), typed)
        pipeline.stages.append(Stage(stage, [_filled(word, folders) for word in words], folders[stage]))
    return pipeline


def _flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the other words."""
    flags, words, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-m", "--multirun"):
            raise ConfigError(
                [f"{word}: a pipeline is one run after another, not a sweep: leave {word} out, and type seed=<number>"]
            )
        if word in ("--config-dir", "-cd") and rest:
            flags += [word, rest.pop(0)]
        else:
            (flags if word.startswith("-") else words).append(word)
    return [flag for flag in flags if flag not in ("-h", "--help")], words


def _file(name: str, flags: Sequence[str]) -> Path:
    own = [Path(folder) for flag, folder in itertools.pairwise(flags) if flag in ("--config-dir", "-cd")]
    found = {file.stem: file for folder in (CONF, *own) for file in sorted((folder / "pipeline").glob("*.yaml"))}
    if name not in found:
        raise ConfigError([f"pipeline: there is no {name!r}: type pipeline=<one of {', '.join(found)}>"])
    return found[name]


def _split(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Words for every stage, and those for one: `pipeline.dpo.algorithm.beta=0.1`."""
    shared: list[str] = []
    own: dict[str, list[str]] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        match = re.match(r"pipeline\.(\w+)\.(.+)", word, re.DOTALL)
        if match and match[1] in names:
            own.setdefault(match[1], []).append(match[2])
        elif match or key.startswith("pipeline."):
            raise ConfigError([f"{key}: there is no such stage: type pipeline.<one of {', '.join(names)}>.<word>"])
        elif key not in ("pipeline", "output_dir", "resume"):
            shared.append(word)
    return shared, own


def _merged(words: Sequence[str], typed: Sequence[str]) -> list[str]:
    """A word that is typed takes the place of the stage's own with the same key."""
    typed = list({word.partition("=")[0]: word for word in typed}.values())
    keys = {word.partition("=")[0].lstrip("+~") for word in typed}
    return [*(word for word in words if word.partition("=")[0].lstrip("+~") not in keys), *typed]


def _filled(word: str, folders: dict[str, Path]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: str(folders.get(match[1], match[0])), word)


# ---- running -------------------------------------------------------------------------------------------------------
def _preflight(pipeline: Pipeline) -> None:
    """ConfigError with the problems of every stage that is not done. What another is still to make is not missed."""
    problems: list[str] = []
    for stage in pipeline.stages:
        if stage.done or (stage.folder / "config.yaml").exists():
            continue
        try:
            config.preflight(config.parse([*pipeline.flags, *stage.words, f"output_dir={stage.folder}"]))
        except ConfigError as error:
            made = [str(other.folder) for other in pipeline.stages if other is not stage and not other.done]
            found = [problem for problem in error.problems if not any(folder in problem for folder in made)]
            problems += [f"[stage {stage.name}] {problem}" for problem in found]
    if problems:
        raise ConfigError(problems)


def _run_stage(pipeline: Pipeline, stage: Stage, start: Start) -> None:
    checkpoints = list((stage.folder / "checkpoints").glob("*.ckpt"))
    if not checkpoints and stage.folder.exists():
        shutil.rmtree(stage.folder)  # it was cut off before there was anything to go on from
    words = [f"resume={stage.folder}"] if checkpoints else [*stage.words, f"output_dir={stage.folder}"]
    try:
        start([*pipeline.flags, *words])
    except Interrupted:
        raise Interrupted(pipeline.folder) from None
    except UserError as error:
        raise UserError(
            f"stage {stage.name}: {error}\nto go on once it is mended: python run.py resume={pipeline.folder}"
        ) from error
    if not stage.done:
        raise UserError(f"stage {stage.name}: ended without a summary, see {stage.folder}")


def _shown(pipeline: Pipeline) -> str:
    """The text of `--help pipeline=zephyr`."""
    lines = [f"pipeline={pipeline.name}: {pipeline.about}", ""]
    for stage in pipeline.stages:
        words = [word.replace(f"{pipeline.folder}/", "") for word in stage.words]
        lines.append(f"  {stage.folder.name}\n      {' '.join(words)}")
    lines += ["", f"At full scale: {pipeline.full_scale}", ""]
    return "\n".join([*lines, "Words typed besides go to every stage, pipeline.<stage>.<word> to one of them."])
