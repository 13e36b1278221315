"""Every problem of one plain config, found without importing what it names.

The config is bound to the signatures of its targets (`signatures.py`), keys without a target are compared with
conf/config.yaml, and combinations are left to `rules.py`. Each message is `key: what is wrong: type what-to-type`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from alignment import help as manual
from alignment import rules, signatures

CONF = Path(__file__).resolve().parent.parent / "conf"

# Arguments that code adds when it builds a node (`group.*`: every node in a group); they are not keys.
PASSED: dict[str, set[str]] = {
    "algorithm": {"source", "reference", "optimizer", "callbacks"},
    "optimizer": {"params", "lr"},
    "logger.*": {"folder"},
    "task": {"cfg"},
}
# Sections without `_target_`, and the function that takes their keys together with these arguments of code.
SECTIONS: dict[str, tuple[str, set[str]]] = {
    "encoding": ("alignment.data.encode.encode", {"rows", "form", "tokenizer", "stop_ids", "into", "bad_rows", "drop"}),
    "cleaning": ("alignment.data.clean.clean", {"rows", "heldout", "form"}),
    "checkpoint": ("alignment.callbacks.checkpoint.BoundaryCheckpoint", {"folder", "online"}),
    "trainer": ("lightning.pytorch.Trainer", set()),
    "model.lora": ("peft.LoraConfig", set()),
}
# Groups of which several options can be chosen, each of them a node with a name of its own.
SEVERAL = {"reward", "logger"}
# Groups of which nothing need be chosen.
MAY_BE_EMPTY = {"reward", "logger", "experiment", "pipeline"}


def validate(cfg: dict[str, Any], *, without: Collection[str] = ()) -> list[str]:
    """Every problem of a plain, resolved config. without: groups whose option is not the one that was meant."""
    found = [*_schema_problems(cfg)]
    for key, node, target, passed in _targets(cfg):
        found += signatures.bind(key, node, target, passed)
    reported = {message.split(":", 1)[0] for message in found}
    known = {group: node for group, node in cfg.items() if group not in without}
    found += [message for message in rules.problems(known) if message.split(":", 1)[0] not in reported]
    return [message for message in found if re.split(r"[.:]", message)[0] not in without]


def _targets(cfg: dict[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str, set[str]]]:
    """Every (key, node, target, arguments passed by code), the sections of SECTIONS included."""
    for key, node in _nodes(cfg):
        if isinstance(node["_target_"], str):
            yield key, node, node["_target_"], PASSED.get(key) or PASSED.get(f"{key.partition('.')[0]}.*", set())
    for key, (target, passed) in SECTIONS.items():
        section = rules.get(cfg, key)
        if isinstance(section, dict):
            yield key, section, target, passed


def _nodes(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict) and "_target_" in value:
        yield path, value
    for name, inner in items:
        yield from _nodes(inner, f"{path}.{name}" if path else str(name))


@functools.cache
def schema() -> dict[str, Any]:
    """The keys of conf/config.yaml that belong to no group, with their defaults."""
    whole = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    return {str(name): value for name, value in whole.items() if name not in ("defaults", "hydra")}


def _schema_problems(cfg: dict[str, Any]) -> Iterator[str]:
    groups = manual.groups(CONF)
    for name in cfg:
        if name not in schema() and name not in groups:
            yield signatures.unknown(name, [*schema(), *groups], "there is no such key", cfg[name])
    for group, chosen in groups.items():
        if chosen and group not in cfg and group not in MAY_BE_EMPTY:
            yield f"{group}: nothing is chosen: type {group}={chosen[0]}"
    for name, default in schema().items():
        if not isinstance(default, dict):
            yield from _compare(name, cfg, name, default)
        elif not isinstance(cfg.get(name), dict):
            said = signatures.as_yaml(cfg.get(name))
            yield f"{name}: {said} is no section: type {name}.{next(iter(default))}=<value>"
        elif name not in SECTIONS:
            yield from _section_problems(name, cfg[name], default)
    for group in SEVERAL & set(cfg):
        for name, node in cfg[group].items():
            if not isinstance(node, dict):
                yield f"{group}.{name}: {signatures.as_yaml(node)} is no {group}: type ~{group}.{name} to leave it out"
    for key, node in _nodes(cfg):
        if not isinstance(node["_target_"], str) and node["_target_"] is not signatures.UNSET:
            yield f"{key}._target_: {node['_target_']!r} is no dotted name: type {key.partition('.')[0]}=<option>"


def _section_problems(name: str, section: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    for key in section:
        if key not in defaults:
            yield signatures.unknown(f"{name}.{key}", defaults, "there is no such key", section[key])
    for key, default in defaults.items():
        yield from _compare(f"{name}.{key}", section, key, default)


def _compare(path: str, section: Mapping[str, Any], key: str, default: Any) -> Iterator[str]:
    """A key without a signature has the type of its default; null says nothing about it."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if key not in section:
        yield f"{path}: missing: type +{path}={signatures.as_yaml(default)}"
    elif section[key] is not signatures.UNSET and default is not None:
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if type(section[key]) not in kinds:
            yield signatures.wrong_type(path, section[key], [words[type(default)]])


def external_problems(cfg: dict[str, Any]) -> list[str]:
    """What the targets of other packages do not take, now that importing them is paid for."""
    problems = []
    for key, node, target, passed in _targets(cfg):
        if target.startswith(f"{signatures.PACKAGE}."):
            continue
        try:
            module, _, name = target.rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        except Exception as error:  # importing runs foreign code: whatever it raises, this choice cannot be used
            problems.append(f"{key}._target_: {target} cannot be imported ({error}): type --help {key.split('.')[0]}")
            continue
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        names = set(parameters) - passed
        given = set(node) - signatures.HYDRA_KEYS
        why = f"{target} takes no such key"
        problems += [signatures.unknown(f"{key}.{name}", names, why) for name in sorted(given - names)]
    return problems
