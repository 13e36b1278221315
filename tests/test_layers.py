"""The rules of the code that a reader can rely on everywhere: layers, libraries, sizes, nothing unfinished.

All of it is read off the syntax trees; nothing is imported.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up: a row imports from itself and from rows before it, and of the libraries only those named.
# The same table is in CONTRIBUTING.md.
ROWS: dict[str, set[str]] = {
    "errors": set(),
    "batch": {"torch"},
    "losses": {"torch"},
    "model": {"torch", "transformers", "peft", "bitsandbytes", "safetensors", "filelock"},
    "ref_strategy": {"torch", "transformers", "safetensors", "filelock"},
    "reward": {"torch", "transformers", "peft", "math_verify", "reasoning_gym", "jsonschema", "referencing"},
    "rollout": {"torch", "transformers"},
    "data": {"torch", "transformers", "datasets", "pyarrow", "lightning", "reasoning_gym"},
    "strategy": {"torch", "lightning", "transformers", "deepspeed", "bitsandbytes"},
    "callbacks": {"torch", "lightning", "rich", "tqdm"},
    "algorithm": {"torch", "lightning", "transformers"},
    "experiment": {"numpy", "pandas", "matplotlib", "scipy", "lightning", "wandb", "torch", "yaml"},
    "config": {"hydra", "omegaconf", "yaml"},
    "task": {"torch", "lightning", "transformers", "peft", "rich", "tqdm", "pandas", "numpy", "yaml"}
    | {"huggingface_hub"},
    "pipeline": {"yaml"},
    "sweep": {"yaml"},
}
# Files beside the packages that belong to a row of another name: what composes, checks, starts runs; what asks servers.
ROW_OF: dict[str, str] = dict.fromkeys(("help", "jobs", "rules", "signatures", "validate"), "config")
ROW_OF["json_client"] = "errors"
# It answers before anything heavy is imported, so it stands apart from the rows before it.
ALONE = {"config": {"errors", "config"}}

MODULES = sorted((ROOT / "alignment").rglob("*.py"))
FOLDERS = ("alignment", "benchmarks", "scripts", "tests")
SOURCES = [ROOT / "run.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(file:line, absolute dotted name) of every import, those inside functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((f"{name_of(path)}:{node.lineno}", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute here"
            yield from ((f"{name_of(path)}:{node.lineno}", f"{node.module}.{alias.name}") for alias in node.names)


def row_of(dotted: str) -> str:
    """Row of a dotted name that begins with `alignment.`."""
    first = dotted.split(".")[1]
    return ROW_OF.get(first, first)


def modules_by_row() -> Iterator[tuple[str, Path]]:
    for path in MODULES:
        if path.parent.name != "alignment" or path.stem != "__init__":
            yield row_of(".".join(path.relative_to(ROOT).with_suffix("").parts)), path


def test_a_file_imports_only_from_its_row_and_the_rows_before() -> None:
    order = list(ROWS)
    wrong = [
        f"{where} imports {name}: {row} may not import from {row_of(name)}"
        for row, path in modules_by_row()
        for where, name in imports(path)
        if name.startswith("alignment.")
        and row_of(name) not in ALONE.get(row, order[: order.index(row) + 1] if row in order else ())
    ]
    assert not wrong


def test_every_file_is_in_a_row() -> None:
    assert {row for row, _ in modules_by_row()} == set(ROWS)


def test_a_file_imports_only_the_libraries_of_its_row() -> None:
    free = sys.stdlib_module_names | {"alignment", "__main__"}
    wrong = [
        f"{where} imports {name}: the libraries of {row} are {sorted(ROWS.get(row, ()))}"
        for row, path in modules_by_row()
        for where, name in imports(path)
        if name.split(".")[0] not in free | ROWS.get(row, set())
    ]
    assert not wrong


def test_every_library_is_declared() -> None:
    """What is imported is asked for by name, not hoped for as a dependency of something else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[\[<>=!]", requirement)[0].replace("-", "_") for requirement in declared}
    renamed = {"hydra": "hydra_core", "yaml": "pyyaml"}
    assert {renamed.get(library, library) for library in set().union(*ROWS.values())} <= names


def test_every_package_has_an_init_that_imports_nothing() -> None:
    """A name has one place to be imported from, and importing one module does not import its neighbours."""
    inits = {path.parent / "__init__.py" for path in MODULES}
    assert not [name_of(init) for init in inits if not init.exists() or list(imports(init))]


def test_only_two_files_know_hydra() -> None:
    users = {name_of(path) for path in SOURCES if not name_of(path).startswith("tests/") and knows_hydra(path)}
    assert users <= {"run.py", "alignment/config.py"}


def knows_hydra(path: Path) -> bool:
    return any(name.split(".")[0] in ("hydra", "omegaconf") for _, name in imports(path))


def test_no_function_is_longer_than_60_lines() -> None:
    too_long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not too_long


def test_the_entry_point_is_shorter_than_60_lines() -> None:
    assert len((ROOT / "run.py").read_text().splitlines()) < 60


def test_nothing_is_unfinished_or_silenced() -> None:
    """No stub, no swallowed error, no test that is switched off or cannot fail."""
    found = [
        f"{name_of(path)}:{line} {why}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        for line, why in faults(node)
    ]
    assert not found


def faults(node: ast.AST) -> Iterator[tuple[int, str]]:
    line = getattr(node, "lineno", 0)
    match node:
        case ast.Name(id="NotImplementedError"):
            yield line, "NotImplementedError: what is not there is not offered"
        case ast.ExceptHandler(type=None):
            yield line, "a bare except hides Ctrl-C and bugs"
        case ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"), body=[ast.Pass()]):
            yield line, "an error is swallowed"
        case ast.Assert(test=ast.Constant(value=value)) if value:
            yield line, "an assert that cannot fail"
        case ast.Attribute(value=ast.Name(id="pytest"), attr="skip" | "xfail" | "importorskip"):
            yield line, "a test that may not run"
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest")), attr="skip" | "xfail" | "skipif"):
            yield line, "a test that may not run"


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("raise NotImplementedError", 1),
        ("try:\n    f()\nexcept:\n    g()", 1),
        ("try:\n    f()\nexcept Exception:\n    pass", 1),
        ("try:\n    f()\nexcept Exception as error:\n    raise g() from error", 0),
        ("assert True", 1),
        ("assert 1, 'why'", 1),
        ("assert x", 0),
        ("pytest.skip('later')", 1),
        ("@pytest.mark.skipif(True)\ndef test(): ...", 1),
        ("@pytest.mark.slow\ndef test(): ...", 0),
    ],
)
def test_the_faults_are_found(source: str, number: int) -> None:
    assert sum(len(list(faults(node))) for node in ast.walk(ast.parse(source))) == number


def test_no_comment_puts_work_off() -> None:
    marks = re.compile(r"#.*\b(TO[D]O|FIX[M]E|X{3}|HA[C]K)\b")  # spelt so as not to find itself
    found = [
        f"{name_of(path)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_every_loss_has_its_test() -> None:
    losses = [path.name for path in MODULES if path.parent.name == "losses" and path.stem != "__init__"]
    assert not [name for name in losses if not (ROOT / "tests" / "losses" / f"test_{name}").exists()]


def test_the_layer_table_of_the_contributing_guide_is_this_one() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)[/.].*\| ([^|]*) \|$", section, flags=re.MULTILINE)
    assert [row for row, _ in rows] == list(ROWS)
    assert {row: set(re.findall(r"[a-z_]+", libraries)) for row, libraries in rows} == ROWS
