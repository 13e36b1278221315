"""Signatures read from source agree with what Python itself says, and values are checked against annotations."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment import signatures

BASE = """
from typing import ClassVar, Literal
from dataclasses import dataclass, field
from torch import nn

Schedule = Literal["constant", "linear"]
Alias = Schedule | None


class Base(nn.Module):
    form: ClassVar[str] = "pairs"
    online: bool = False

    def __init__(self, source, callbacks=(), *, lr: float, schedule: Schedule, steps: int | None) -> None: ...


@dataclass
class Settings:
    name: str
    num: int = 3
    extra: list[str] = field(default_factory=list)
    hidden: int = field(init=False, default=1)
    kind: ClassVar[str] = "x"


@dataclass
class MoreSettings(Settings):
    last: float = 0.0


class Bare(nn.Module):
    online = True


def function(cfg: dict, *, size: int = 1, **rest): ...
"""

CHILD = """
from typing import Any
from toyproject.base import Alias, Base, Bare as Renamed
from . import base


class Child(Base):
    def __init__(self, *passed: Any, beta: float, **common: Any) -> None:
        super().__init__(*passed, **common)


class Grandchild(Child):
    min_group = 2

    def __init__(self, *, lr: float = 0.5, alias: Alias = None, **common: Any) -> None:
        super().__init__(lr=lr, steps=None, **common)


class Unrelated(Renamed): ...


class Open(base.Base):
    def __init__(self, *, only: "int | None", **rest: Any) -> None: ...
"""


@pytest.fixture(autouse=True)
def toyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of its own that counts as this one; nothing in it is ever imported."""
    folder = tmp_path / "toyproject"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "base.py").write_text(BASE)
    (folder / "child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(signatures, "PACKAGE", "toyproject")
    signatures.load.cache_clear()


def names(target: str) -> set[str]:
    found = signatures.signature(target)
    assert found is not None
    return set(found.parameters)


def test_keywords_are_merged_with_those_of_the_bases() -> None:
    assert names("toyproject.child.Child") == {"beta", "source", "callbacks", "lr", "schedule", "steps"}


def test_what_a_class_gives_to_its_base_is_not_a_key() -> None:
    """Grandchild sets `steps` itself and takes `lr` under its own default."""
    found = signatures.signature("toyproject.child.Grandchild")
    assert found is not None
    assert not found.is_open
    assert set(found.parameters) == {"lr", "alias", "beta", "source", "callbacks", "schedule"}
    assert found.parameters["lr"].default is not None


def test_inheritance_through_renamed_and_dotted_imports() -> None:
    assert names("toyproject.child.Unrelated") == set()
    assert names("toyproject.child.Open") == {"only", "source", "callbacks", "lr", "schedule", "steps"}


def test_dataclasses_have_their_fields() -> None:
    assert names("toyproject.base.MoreSettings") == {"name", "num", "extra", "last"}


def test_a_function_with_keywords_is_open() -> None:
    found = signatures.signature("toyproject.base.function")
    assert found is not None
    assert found.is_open
    assert set(found.parameters) == {"cfg", "size"}


@pytest.mark.parametrize("target", ["toyproject.base.Nothing", "toyproject.nothing.X", "nosuchpackage.X", "toyproject"])
def test_what_is_not_there_has_no_signature(target: str) -> None:
    assert signatures.signature(target) is None


def test_nothing_was_imported() -> None:
    names("toyproject.child.Child")
    assert "toyproject" not in sys.modules


@pytest.mark.parametrize("target", ["torch.optim.AdamW", "lightning.pytorch.Trainer", "peft.LoraConfig"])
def test_other_packages_are_read_as_python_reads_them(target: str) -> None:
    module, _, name = target.rpartition(".")
    truth = inspect.signature(getattr(__import__(module, fromlist=[name]), name)).parameters
    assert names(target) == set(truth)


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("toyproject.child.Grandchild", "min_group", 2),
        ("toyproject.child.Grandchild", "form", "pairs"),
        ("toyproject.child.Child", "online", False),
        ("toyproject.child.Unrelated", "online", True),
        ("toyproject.child.Child", "absent", "default"),
    ],
)
def test_declarations_are_inherited(target: str, name: str, value: Any) -> None:
    assert signatures.declared(target, name, "default") == value


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", [0, -3], [1.0, True, "1", None, [1]]),
        ("float", [0, 5e-7, -1.5], [True, "5e-7", None]),
        ("bool", [True, False], [0, 1, "true", None]),
        ("str", ["", "5"], [5, None, ["a"]]),
        ("int | None", [3, None], ["None", 1.5, False]),
        ("Optional[float]", [0.5, 2, None], ["None", True]),
        ("Union[str, int]", ["a", 1], [1.5, None]),
        ("'float | None'", [0.5, None], ["x"]),
        ("Literal['a', 1, True]", ["a", 1, True], ["b", 1.0, False, None]),
        ("list[int]", [[], [1, 2]], [[1, "a"], 1, "ab"]),
        ("list[str] | str | None", [["a"], "a", None], [[1], 3]),
        ("tuple[float, float]", [[0.9, 0.99]], [["a", 1], 0.9]),
        ("Sequence[str]", [["a"]], ["a"]),
        ("dict[str, float]", [{"a": 1}, {}], [{"a": "x"}, [1], None]),
        ("Mapping", [{"a": "x"}], [[1]]),
        ("Path", ["a/b"], [3]),
        ("Schedule", ["linear"], ["cosine", None, 1]),
        ("Alias", ["constant", None], ["cosine"]),
        ("Any", [1, None, "x"], []),
        ("nn.Module", [{"_target_": "x.Y"}, "anything"], []),
        ("int", [{"_target_": "x.Y"}], []),
        ("Callable[..., int]", ["x"], []),
    ],
)
def test_values_fit_annotations(annotation: str, good: list[Any], bad: list[Any]) -> None:
    import ast

    module = signatures.load("toyproject.base")
    assert module is not None
    node = ast.parse(annotation, mode="eval").body
    assert [value for value in good if not signatures.accepts(node, value, module)] == []
    assert [value for value in bad if signatures.accepts(node, value, module)] == []


def bind(target: str, **node: Any) -> list[str]:
    return list(signatures.bind("group", node, target, passed={"source", "callbacks"}))


def test_a_good_node_binds() -> None:
    keys: dict[str, Any] = {"beta": 0.1, "lr": 1e-4, "schedule": "linear", "steps": None}
    assert bind("toyproject.child.Child", _target_="toyproject.child.Child", **keys) == []


def test_every_problem_of_a_node_is_told() -> None:
    found = bind("toyproject.child.Child", bta=0.1, lr="5e-7", schedule="liner", steps="None", source=1)
    assert found == [
        "group.bta: Child takes no such key; did you mean group.beta? type group.beta=0.1",
        "group.lr: text '5e-7' is not a number: type group.lr=5e-7",
        "group.schedule: text 'liner' is not constant or linear: type group.schedule=linear",
        "group.steps: text 'None' is not a whole number or null: type group.steps=null",
        "group.source: Child takes no such key: type one of these, or leave it out: beta, lr, schedule, steps",
        "group.beta: missing, Child needs it: type +group.beta=<a number>",
    ]


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        (8.0, ["a whole number"], "8"),
        ("1e3", ["a whole number"], "1000"),
        ("yes", ["true or false"], "true"),
        (0, ["true or false"], "false"),
        (True, ["a number"], "<a number>"),
        ("grup", ["group", "batch"], "group"),
        (None, ["text"], "<text>"),
    ],
)
def test_the_hint_is_the_nearest_right_value(value: Any, words: list[Any], hint: str) -> None:
    assert signatures.wrong_type("k", value, words).endswith(f": type k={hint}")


def test_a_partial_may_lack_arguments() -> None:
    assert bind("toyproject.child.Child", _partial_=True) == []


def test_other_packages_are_checked_for_names_and_for_numbers_that_are_text() -> None:
    found = list(signatures.bind("optimizer", {"betas": [0.9, 0.99], "eps": "1e-8", "wd": 0}, "torch.optim.AdamW"))
    assert [message.split(":")[0] for message in found] == ["optimizer.eps", "optimizer.wd"]
    assert found[0].endswith("type optimizer.eps=1e-8")


def test_a_target_that_is_not_there_is_told() -> None:
    assert "there is no toyproject.child.Chld" in bind("toyproject.child.Chld")[0]
    assert bind("nosuchpackage.X")[0].endswith("type pip install nosuchpackage")


def test_an_unresolved_value_is_not_told_twice() -> None:
    keys: dict[str, Any] = {"beta": signatures.UNSET, "lr": 1e-4, "schedule": "linear", "steps": None}
    assert bind("toyproject.child.Child", **keys) == []
