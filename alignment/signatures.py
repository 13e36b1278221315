"""What a `_target_` takes and declares, read from its source with `ast`: nothing is imported, so it takes milliseconds.

A config can then be refused before torch, Lightning or transformers load. `signature()` follows the imports of a
module, merges a class whose `__init__` ends in `**common` with its bases, and reads dataclasses; `bind()` compares a
node's keys and values with it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "alignment"
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
# Bases whose constructors take nothing by name; following them would mean parsing thousands of lines.
BARE_BASES = {"object", "ABC", "Protocol", "Generic", "Module", "LightningModule", "Callback", "Exception"}


class _Unset:
    """Stands for a value that is missing or cannot be resolved: reported once, then left alone by every other check."""

    def __repr__(self) -> str:
        return "???"


UNSET = _Unset()


# ---- modules -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Module:
    """The top-level names of one source file: a definition, or ("module", "name") where it was imported from."""

    name: str
    names: Mapping[str, ast.AST | tuple[str, str | None]] = field(compare=False)


@cache
def load(name: str) -> Module | None:
    """Parse a module by its dotted name. None where there is no Python source for it."""
    path = _source(name)
    if path is None:
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return Module(name, dict(_top_level(tree.body, package)))


def _source(name: str) -> Path | None:
    """Path of a module without importing its parents, as `importlib.util.find_spec` would."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest[:-1], f"{rest[-1]}.py")
        path = path if path.is_file() else path.with_suffix("") / "__init__.py"
    return path if path.suffix == ".py" and path.is_file() else None


def _top_level(body: Iterable[ast.stmt], package: str) -> Iterator[tuple[str, ast.AST | tuple[str, str | None]]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Import):
            yield from (
                (a.asname or a.name.split(".")[0], (a.name if a.asname else a.name.split(".")[0], None))
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((alias.asname or alias.name, (source, alias.name)) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _top_level(node.body, package)
            yield from _top_level(node.orelse, package)


def find(dotted: str) -> tuple[Module, ast.AST] | None:
    """The definition a dotted path leads to, following imports. None where no source says."""
    owner, _, name = dotted.rpartition(".")
    module = load(owner) if owner else None
    return _lookup(module, name) if module else None


def _lookup(module: Module, dotted: str) -> tuple[Module, ast.AST] | None:
    name, _, rest = dotted.partition(".")
    found = module.names.get(name)
    if isinstance(found, tuple):
        source, imported = found
        path = ".".join(part for part in (source, imported, rest) if part)
        return None if path == f"{module.name}.{dotted}" else find(path)
    return (module, found) if found is not None and not rest else None


# ---- signatures ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parameter:
    annotation: ast.expr | None
    default: ast.expr | None
    module: Module  # where the annotation's names are looked up

    def accepts(self, value: Any) -> bool:
        implicitly_none = isinstance(self.default, ast.Constant) and self.default.value is None and value is None
        return implicitly_none or accepts(self.annotation, value, self.module)


@dataclass(frozen=True)
class Signature:
    """Parameters by name; `is_open` where a `**keywords` takes any other name as well."""

    parameters: dict[str, Parameter]
    is_open: bool = False


def signature(target: str) -> Signature | None:
    """Signature of a function or of a class' constructor. None where the source cannot be found."""
    found = find(target)
    if found is None:
        return None
    module, node = found
    if isinstance(node, ast.ClassDef):
        return _constructor(module, node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Signature(_parameters(module, node.args), node.args.kwarg is not None)
    return None


def _parameters(module: Module, args: ast.arguments) -> dict[str, Parameter]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return {arg.arg: Parameter(arg.annotation, default, module) for arg, default in pairs}


def _constructor(module: Module, node: ast.ClassDef) -> Signature:
    """`__init__` of the class, merged with the next one of its bases for as long as they end in `**keywords`."""
    parameters: dict[str, Parameter] = {}
    given: set[str] = set()
    for owner, cls in _lineage(module, node):
        if cls is None:
            return Signature(parameters, is_open=True)
        init = next((item for item in cls.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
        if init is None and _is_dataclass(cls):
            return Signature(_fields(module, node) | parameters)
        if init is None:
            continue
        own = dict(list(_parameters(owner, init.args).items())[1:])  # without self
        parameters = {name: p for name, p in own.items() if name not in given} | parameters
        if init.args.kwarg is None:
            return Signature(parameters)
        given |= _given_to_super(init) | set(own)
    return Signature(parameters)


def _given_to_super(init: ast.FunctionDef) -> set[str]:
    """Names that `super().__init__(name=...)` sets itself: they are no longer the caller's to choose."""
    calls = [
        call for call in ast.walk(init) if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
    ]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


def _lineage(module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef | None]]:
    """The class and its bases, depth first; None in place of a base whose source cannot be found."""
    yield module, node
    for base in node.bases:
        dotted = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if dotted.rpartition(".")[2] in BARE_BASES:
            continue
        found = _lookup(module, dotted)
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield from _lineage(found[0], found[1])
        else:
            yield module, None


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = (ast.unparse(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list)
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def _fields(module: Module, node: ast.ClassDef) -> dict[str, Parameter]:
    fields: dict[str, Parameter] = {}
    for owner, cls in reversed([pair for pair in _lineage(module, node) if pair[1] is not None]):
        for item in cls.body if cls is not None and _is_dataclass(cls) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and _is_field(item):
                fields[item.target.id] = Parameter(item.annotation, _field_default(item.value), owner)
    return fields


def _is_field(item: ast.AnnAssign) -> bool:
    annotation = ast.unparse(item.annotation)
    hidden = isinstance(item.value, ast.Call) and any(
        keyword.arg == "init" and ast.unparse(keyword.value) == "False" for keyword in item.value.keywords
    )
    return not hidden and "ClassVar" not in annotation and "KW_ONLY" not in annotation


def _field_default(value: ast.expr | None) -> ast.expr | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        defaults = {keyword.arg: keyword.value for keyword in value.keywords}
        return defaults.get("default") or defaults.get("default_factory")
    return value


def declared(target: str, name: str, default: Any = None) -> Any:
    """A literal class attribute of a target, its own or inherited: how a class says what it needs."""
    found = find(target)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return default
    for _, cls in _lineage(found[0], found[1]):
        for item in cls.body if cls is not None else ():
            targets = (
                item.targets
                if isinstance(item, ast.Assign)
                else [item.target]
                if isinstance(item, ast.AnnAssign)
                else []
            )
            if any(isinstance(t, ast.Name) and t.id == name for t in targets) and item.value is not None:  # pyright: ignore
                return ast.literal_eval(item.value)  # pyright: ignore
    return default


# ---- types ---------------------------------------------------------------------------------------------------------
LISTS = {"list", "List", "Sequence", "Iterable", "Collection", "set", "frozenset", "tuple", "Tuple"}
DICTS = {"dict", "Dict", "Mapping", "MutableMapping"}
SIMPLE = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "None": "null"}


def accepts(annotation: ast.expr | None, value: Any, module: Module) -> bool:
    """Whether a config value fits an annotation. Names that no source explains accept anything."""
    if annotation is None or value is UNSET or (isinstance(value, Mapping) and "_target_" in value):
        return True
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return accepts(ast.parse(text, mode="eval").body, value, module)
        case ast.BinOp(op=ast.BitOr()):
            return accepts(annotation.left, value, module) or accepts(annotation.right, value, module)
        case ast.Subscript():
            return _accepts_subscript(annotation, value, module)
        case ast.Name() | ast.Attribute():
            return _accepts_name(annotation, value, module)
    return True


def _accepts_subscript(annotation: ast.Subscript, value: Any, module: Module) -> bool:
    name = ast.unparse(annotation.value).rpartition(".")[2]
    inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if name == "Literal":
        return any(value == (item := ast.literal_eval(i)) and type(value) is type(item) for i in inside)
    if name == "Optional":
        return value is None or accepts(inside[0], value, module)
    if name == "Union":
        return any(accepts(item, value, module) for item in inside)
    if name in ("Annotated", "Final"):
        return accepts(inside[0], value, module)
    if name in LISTS:
        items = [item for item in inside if not (isinstance(item, ast.Constant) and item.value is ...)]
        return isinstance(value, list) and all(any(accepts(item, v, module) for item in items) for v in value)
    if name in DICTS:
        return isinstance(value, Mapping) and all(accepts(inside[-1], v, module) for v in value.values())
    return True


def _accepts_name(annotation: ast.Name | ast.Attribute, value: Any, module: Module) -> bool:
    dotted = ast.unparse(annotation)
    name = dotted.rpartition(".")[2]
    simple: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    if name in simple:
        return type(value) in simple[name]  # not isinstance: true is no number
    if name in ("Path", "PathLike"):
        return isinstance(value, str)
    if name in LISTS:
        return isinstance(value, list)
    if name in DICTS:
        return isinstance(value, Mapping)
    found = _lookup(module, dotted)
    is_alias = found is not None and isinstance(found[1], (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute))
    return accepts(found[1], value, found[0]) if found and is_alias else True  # pyright: ignore


def alternatives(annotation: ast.expr | None, module: Module) -> list[Any]:
    """What may be typed: literals as they are, other types as a description, such as "a whole number"."""
    match annotation:
        case ast.Constant(value=None):
            return ["null"]
        case ast.Constant(value=str(text)):
            return alternatives(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(op=ast.BitOr()):
            return alternatives(annotation.left, module) + alternatives(annotation.right, module)
        case ast.Subscript():
            name = ast.unparse(annotation.value).rpartition(".")[2]
            inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            if name == "Literal":
                return [ast.literal_eval(item) for item in inside]
            if name in ("Optional", "Union"):
                items = [word for item in inside for word in alternatives(item, module)]
                return items + (["null"] if name == "Optional" else [])
            return ["a list, as [a,b]"] if name in LISTS else ["a mapping, as {a:1}"] if name in DICTS else [name]
        case ast.Name() | ast.Attribute():
            dotted = ast.unparse(annotation)
            name = dotted.rpartition(".")[2]
            found = None if name in SIMPLE else _lookup(module, dotted)
            if found and isinstance(found[1], (ast.Subscript, ast.BinOp)):
                return alternatives(found[1], found[0])
            return [SIMPLE.get(name, "a list, as [a,b]" if name in LISTS else "a path" if name == "Path" else name)]
    return []


# ---- binding -------------------------------------------------------------------------------------------------------
def bind(key: str, node: Mapping[str, Any], target: str, passed: Iterable[str] = ()) -> Iterator[str]:
    """Problems of calling `target` with the keys of a node; `passed` are the arguments that code adds.

    Keys and types are checked for targets of this package. Of other packages only unknown keys are reported, and
    numbers that are text: their annotations are not always meant.
    """
    spec = signature(target)
    if spec is None:
        yield from _not_found(key, target)
        return
    own = target.startswith(f"{PACKAGE}.")
    wanted = {name: p for name, p in spec.parameters.items() if name not in set(passed)}
    given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
    for name, value in given.items():
        if name in wanted:
            if (own or is_number_as_text(value)) and not wanted[name].accepts(value):
                yield wrong_type(f"{key}.{name}", value, alternatives(wanted[name].annotation, wanted[name].module))
        elif not spec.is_open:
            yield unknown(f"{key}.{name}", wanted, f"{target.rpartition('.')[2]} takes no such key", value)
    for name, parameter in wanted.items() if own and not node.get("_partial_") else ():
        if name not in given and parameter.default is None:
            words = alternatives(parameter.annotation, parameter.module)
            yield f"{key}.{name}: missing, {target.rpartition('.')[2]} needs it: type +{key}.{name}=<{spell(words)}>"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number_as_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) == float(value)
    except ValueError:
        return False


def _not_found(key: str, target: str) -> Iterator[str]:
    """A target of this package must be there; of another one the package must be installed. More is seen at import."""
    top = target.partition(".")[0]
    if top == PACKAGE:
        yield f"{key}._target_: there is no {target}: type --help {key.partition('.')[0]} to see what can be chosen"
    elif importlib.util.find_spec(top) is None:
        yield f"{key}._target_: {target} needs the package {top}, which is not installed: type pip install {top}"


def unknown(key: str, known: Iterable[str], why: str, value: Any = "<value>") -> str:
    """Message for a key that does not exist, with the nearest one that does."""
    parent, _, name = key.rpartition(".")
    names = sorted(set(known) - HYDRA_KEYS)
    near = difflib.get_close_matches(name, names, 1, 0.6)
    if near:
        nearest = f"{parent}.{near[0]}" if parent else near[0]
        return f"{key}: {why}; did you mean {nearest}? type {nearest}={as_yaml(value)}"
    return f"{key}: {why}: type one of these, or leave it out: {', '.join(names) or '(it takes no keys)'}"


def wrong_type(key: str, value: Any, words: list[Any]) -> str:
    """Message for a value of the wrong type, with the nearest right one."""
    shown = (
        f"text {value!r}"
        if isinstance(value, str)
        else "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )
    return f"{key}: {shown} is not {spell(words)}: type {key}={_suggest(value, words)}"


def spell(words: list[Any]) -> str:
    return " or ".join(as_yaml(word) for word in words) or "a value"


def as_yaml(value: Any) -> str:
    """A value as it is typed."""
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _suggest(value: Any, words: list[Any]) -> str:
    if value in ("None", "none", "null", "") and "null" in words:
        return "null"
    if "a number" in words or "a whole number" in words:
        try:
            number = float(value)
            if "a number" in words and not isinstance(value, bool):
                return str(value)
            if number == int(number) and not isinstance(value, bool):
                return str(int(number))
        except (TypeError, ValueError, OverflowError):
            pass
    if "true or false" in words and isinstance(value, (str, int)):
        return "true" if str(value).lower() in ("yes", "on", "1", "true") else "false"
    literals = [word for word in words if not isinstance(word, str) or word not in {*SIMPLE.values(), "null"}]
    near = difflib.get_close_matches(str(value), [str(word) for word in literals], 1, 0.4)
    return near[0] if near else f"<{spell(words)}>"
