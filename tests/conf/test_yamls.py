"""Every yaml of conf/ can be chosen, binds to the code it names, and is explained by `--help`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment import config, rules
from alignment import help as manual
from alignment.validate import CONF, validate

YAMLS = sorted(path for path in CONF.rglob("*.yaml") if path != CONF / "config.yaml")
OPTIONS = [(group, name) for group in manual.groups(CONF) for name in manual.options(CONF, group)]
ALGORITHMS = sorted(manual.options(CONF, "algorithm"))


Composed = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture(scope="module")
def composed() -> Iterator[Composed]:
    """Compose overrides: the plain config and every problem of it, those of `validate` left out.

    One session for all tests of this file, which composes every choice once.
    """
    with config.composer(config.parse([])) as session:

        def compose(*overrides: str) -> tuple[dict[str, Any], list[str]]:
            cfg, whole, problems, _ = session.settle(overrides)
            assert cfg is not None, problems
            assert whole is not None
            config._place(whole, None)
            plain, more = config.resolve(cfg)
            return plain, problems + more

        yield compose


@pytest.mark.parametrize(("group", "name"), OPTIONS, ids=[f"{group}={name}" for group, name in OPTIONS])
def test_every_option_composes_and_binds(composed: Composed, group: str, name: str) -> None:
    """With the default others. A value may be required and a rule may refuse; names, types and targets are right."""
    plain, problems = composed(f"{'+' if group not in _default_groups() else ''}{group}={name}")
    assert [message for message in problems if "is required and has no default" not in message] == []
    of_rules = rules.problems(plain)
    assert [message for message in validate(plain) if message not in of_rules] == []


def _default_groups() -> set[str]:
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return {key.removeprefix("optional ") for item in defaults if isinstance(item, dict) for key in item}


def test_every_yaml_is_an_option_or_a_part_of_one() -> None:
    """Nothing lies about that no choice reaches."""
    reached = {manual.options(CONF, group)[name] for group, name in OPTIONS}
    reached |= {base for path in list(reached) for base in manual._bases(path)}
    assert [path for path in YAMLS if path not in reached] == []


def test_the_default_run_has_no_problem(composed: Composed) -> None:
    plain, problems = composed()
    assert problems + validate(plain) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_accepted_with_a_frozen_reference(composed: Composed, algorithm: str) -> None:
    """But for a value that has no sensible default, such as a teacher."""
    plain, problems = composed(f"algorithm={algorithm}", "ref_strategy=frozen")
    assert [message for message in problems if "is required and has no default" not in message] == []
    assert validate(plain) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_misspelt_key_is_refused_in_every_algorithm(composed: Composed, algorithm: str) -> None:
    _, problems = composed(f"algorithm={algorithm}", "ref_strategy=frozen", "algorithm.lrr=0.1")
    problems = [message for message in problems if "is required and has no default" not in message]
    assert len(problems) == 1
    assert problems[0].startswith("algorithm.lrr: ")
    assert "algorithm.lr" in problems[0].split(": type ")[-1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_added_key_that_nothing_reads_is_refused_in_every_algorithm(composed: Composed, algorithm: str) -> None:
    plain, problems = composed(f"algorithm={algorithm}", "ref_strategy=frozen", "+algorithm.lrr=0.1")
    assert [message for message in problems if "is required and has no default" not in message] == []
    assert [message for message in validate(plain) if message.startswith("algorithm.lrr: ")]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_option_says_what_it_is(path: Path) -> None:
    assert len(manual.description(path)) > 10


@pytest.mark.parametrize("path", [CONF / "config.yaml", *YAMLS], ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_key_has_a_comment_above_it(path: Path) -> None:
    """Except where a yaml sets keys that another one explains."""
    if path.relative_to(CONF).parts[0] not in ("experiment", "pipeline"):
        assert [entry.path for entry in manual.entries(path) if entry.value and not entry.comment] == []
