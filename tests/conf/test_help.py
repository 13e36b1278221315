"""`--help` is what the yaml files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment import config
from alignment import help as manual
from alignment.errors import ConfigError
from alignment.validate import CONF

CONFIG = """\
# The composition.
defaults:
  - _self_
  - fruit: apple
  - nut: [almond, hazel]
  - optional experiment: null

# Seed of
# everything.
seed: 0

part:
  # How many.
  num: 3

hydra:
  run: x
"""
APPLE = """\
# @package fruit
# A sweet one
defaults:
  - base/round
  - _self_

_target_: x.Y
# How sweet.
sweet: 0.5
# Whether it is round: here it is not.
round: false
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    files = {
        "config.yaml": CONFIG,
        "fruit/apple.yaml": APPLE,
        "fruit/pear.yaml": "# A soft one\n_target_: x.Z\n",
        "fruit/_common.yaml": "# Not an option\na: 1\n",
        "fruit/base/round.yaml": "# Round ones.\n\n# Radius in cm.\nradius: 3\n# Whether it is round.\nround: true\n",
        "nut/almond.yaml": "# @package nut.almond\n# A nut\nn: 1\n",
        "nut/hazel.yaml": "# Another\nn: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_groups_come_in_the_order_of_the_defaults_with_what_is_chosen(conf: Path) -> None:
    assert manual.groups(conf) == {"fruit": ["apple"], "nut": ["almond", "hazel"], "experiment": []}


def test_options_are_neither_private_nor_in_subfolders(conf: Path) -> None:
    assert list(manual.options(conf, "fruit")) == ["apple", "pear"]


def test_the_overview_marks_the_defaults_and_lists_the_keys(conf: Path) -> None:
    lines = manual.overview(conf).splitlines()
    assert "   * apple  A sweet one" in lines
    assert "     pear   A soft one" in lines
    assert "   * hazel   Another" in lines
    assert lines[lines.index("  seed=0") + 1].strip() == "Seed of everything."
    assert lines[lines.index("  part.num=3") + 1].strip() == "How many."
    assert not [line for line in lines if "Not an option" in line or "hydra.run" in line]


def test_an_option_shows_its_own_keys_before_those_it_starts_from(conf: Path) -> None:
    text = manual.details(conf, ["fruit=apple"])
    assert text == manual.details(conf, ["apple"])
    assert [line.strip() for line in text.splitlines()] == [
        "fruit=apple: A sweet one",
        "fruit.sweet=0.5",
        "How sweet.",
        "fruit.round=false",
        "Whether it is round: here it is not.",
        "fruit.radius=3",
        "Radius in cm.",
    ]


def test_keys_stand_under_the_package_of_their_file(conf: Path) -> None:
    assert "  nut.almond.n=1" in manual.details(conf, ["almond"]).splitlines()


def test_a_group_shows_its_options(conf: Path) -> None:
    assert manual.details(conf, ["fruit"]).splitlines() == ["fruit", "  apple  A sweet one", "  pear   A soft one"]


def test_what_is_not_there_is_told(conf: Path) -> None:
    with pytest.raises(LookupError, match="plum"):
        manual.details(conf, ["plum"])
    with pytest.raises(ConfigError, match="algorithm=dpoo: there is no such group or option: type --help dpo"):
        config.show_help(config.parse(["--help", "algorithm=dpoo"]))
    with pytest.raises(ConfigError, match="algorithm=nope: there is no such group or option: type --help algorithm"):
        config.show_help(config.parse(["--help", "algorithm=nope"]))
    with pytest.raises(ConfigError, match="dpoo: there is no such group or option: type --help dpo"):
        config.show_help(config.parse(["--help", "dpoo"]))


def test_the_real_overview_names_every_option_and_five_commands() -> None:
    text = config.show_help(config.parse(["--help"]))
    for group in manual.groups(CONF):
        for name, file in manual.options(CONF, group).items():
            assert f" {name} " in text or text.count(f" {name}\n")
            assert manual.description(file).split()[0] in text
    assert text.count("\n  python run.py") == 5
