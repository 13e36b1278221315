"""conf/<group>/<name>.yaml mirrors alignment/<group>/<name>.py: the same path says where code and settings are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONF, CODE = ROOT / "conf", ROOT / "alignment"

# Groups whose options are code of the project.
MIRRORED = ("algorithm", "model", "ref_strategy", "data", "reward", "rollout", "strategy", "task")
# Groups that set keys which others explain: the comment stands where the key is defined.
OVERRIDING = ("experiment", "pipeline")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def targets(node: object) -> Iterator[str]:
    """Every `_target_` below a node."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from targets(value)


def parents(path: Path) -> Iterator[Path]:
    """The yaml files of the same group that a yaml's defaults list names."""
    for entry in load(path).get("defaults", []):
        names = entry.values() if isinstance(entry, dict) else [entry]
        for name in names:
            found = path.parent / f"{name}.yaml"
            if isinstance(name, str) and name != "_self_" and found.exists():
                yield found


def defines(module: str, name: str) -> bool:
    """Whether a module of the project has a top-level definition of that name; read, not imported."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return False
    return any(getattr(node, "name", None) == name for node in ast.parse(path.read_text(encoding="utf-8")).body)


def mirrors(path: Path) -> bool:
    """Whether a yaml names something in the module of its own path, or extends a yaml that does."""
    module = ".".join(("alignment", *path.relative_to(CONF).with_suffix("").parts))
    own = any(target.rpartition(".")[0] == module for target in targets(load(path)))
    return own or any(mirrors(parent) for parent in parents(path))


def key_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line number, key, whether it is explained) of every key that has a value, outside `defaults` and `hydra`."""
    lines = text.splitlines()
    section = ""
    for number, line in enumerate(lines):
        match = re.match(r"( *)([A-Za-z_][\w/.]*):(?:\s+(.*))?$", line)
        if not match:
            continue
        indent, key, value = match.groups(default="")
        section = key if not indent else section
        if section in ("defaults", "hydra") or key.startswith("_") or not value.split("#")[0].strip():
            continue
        above = lines[number - 1].strip() if number else ""
        yield number + 1, key, above.startswith("#") or "#" in value


YAMLS = sorted(CONF.rglob("*.yaml"))
OPTIONS = [path for group in MIRRORED for path in sorted((CONF / group).glob("*.yaml"))]


def test_every_group_has_options() -> None:
    assert {path.parent.name for path in OPTIONS} == set(MIRRORED)


def test_an_option_names_the_module_of_its_own_path() -> None:
    assert not [name_of(path) for path in OPTIONS if not mirrors(path)]


def test_what_a_yaml_names_exists() -> None:
    missing = [
        f"{name_of(path)}: {target}"
        for path in YAMLS
        for target in targets(load(path))
        if target.startswith("alignment.") and not defines(*target.rsplit(".", 1))
    ]
    assert not missing


def classes(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Name -> (file, names of its bases) of every top-level class in a folder."""
    return {
        node.name: (path, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for path in sorted(folder.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def test_an_algorithm_has_its_yaml() -> None:
    """Every LightningModule that is not itself a base (those are named ...Module) can be chosen by its file's name."""
    known = classes(CODE / "algorithm")

    def is_module(name: str) -> bool:
        return name == "LightningModule" or any(map(is_module, known.get(name, (None, []))[1]))

    chosen = {name: path for name, (path, _) in known.items() if is_module(name) and not name.endswith("Module")}
    assert chosen, "the walk found no algorithm at all"
    assert not [name for name, path in chosen.items() if not (CONF / "algorithm" / f"{path.stem}.yaml").exists()]


def test_a_yaml_starts_by_saying_what_it_is() -> None:
    assert not [name_of(path) for path in YAMLS if not path.read_text(encoding="utf-8").startswith("# ")]


def test_every_key_is_explained() -> None:
    """A comment above or beside it says what it does and where its default comes from."""
    bare = [
        f"{name_of(path)}:{line} {key}"
        for path in YAMLS
        if path.relative_to(CONF).parts[0] not in OVERRIDING
        for line, key, explained in key_lines(path.read_text(encoding="utf-8"))
        if not explained
    ]
    assert not bare


def test_keys_without_a_comment_are_found() -> None:
    text = """# what
defaults:
  - a: b
_target_: x.Y
# why
a: 1
b: 2
nest:
  # why
  c: 3
  d: [1]  # why
  e: f
"""
    found = [(key, explained) for _, key, explained in key_lines(text)]
    assert found == [("a", True), ("b", False), ("c", True), ("d", True), ("e", False)]
