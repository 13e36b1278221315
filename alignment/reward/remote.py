"""Assert-style tests of a foreign program, with the tests in another process than the program.

Whoever shares an interpreter with the tests can read them and rewrite what they use. So the program gets a process of
its own (`serve`), the tests another (`check`), each in its own sandbox, with a pair of sockets between them. A test
that calls `f(3)` calls a stand-in: the arguments go over, the value comes back as plain data, and `== 9` is computed
where the program cannot reach. The right answers never leave the tests' process, and nothing that the program sends is
anything but data: numbers, text, lists, or the number of an object that stays with it.

The file runs as a script in the sandbox and imports the standard library alone.
"""

from __future__ import annotations

import ast
import builtins
import collections
import decimal
import fractions
import json
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

CHANNEL = 3
LARGEST = 16 << 20  # bytes of one message

# What the tests may do with an object that stays in the program.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr, "set": setattr, "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    "item": operator.getitem, "put": operator.setitem, "delete": operator.delitem,
    "eq": operator.eq, "lt": operator.lt, "le": operator.le, "add": operator.add, "sub": operator.sub,
    "mul": operator.mul, "enter": lambda x: x.__enter__(), "leave": lambda x: x.__exit__(None, None, None),
}  # fmt: skip


class Gone(BaseException):
    """The other side is no longer there, or speaks nonsense. No `except Exception` of a test may swallow that, and
    where a bare `except:` does, it still counts: see `happened`."""

    happened = False

    def __init__(self) -> None:
        Gone.happened = True


class RemoteError(Exception):
    """The program raised something that is no built-in exception."""


def plain(value: Any, keep: Callable[[Any], Any]) -> Any:
    """JSON of a value. Subclasses become what they are built on, so no comparison of the program's comes along.

    keep: called with what is no data; its answer is sent instead.
    """
    for kind in (bool, int, float, complex, str, bytes, bytearray):
        if isinstance(value, kind):
            return scalar(kind, value)
    if value is None:
        return None
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q")):
        if isinstance(value, kind):
            return [tag, [plain(item, keep) for item in kind.__iter__(value)]]  # pyright: ignore[reportArgumentType]
    if isinstance(value, dict):
        return ["d", [[plain(key, keep), plain(item, keep)] for key, item in dict.items(value)]]
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return ["n", "Fraction" if isinstance(value, fractions.Fraction) else "Decimal", str(value)]
    if isinstance(value, range):
        return ["r", [value.start, value.stop, value.step]]
    return keep(value)


def scalar(kind: type, value: Any) -> Any:
    if kind is bool or (kind is int and abs(int.__int__(value)) < 1 << 53):
        return bool(value) if kind is bool else int.__int__(value)
    if kind is str:
        return str.__str__(value) if type(value) is str else str.__getitem__(value, slice(None))
    if kind is int:
        return ["i", int.__format__(value, "x")]
    if kind is float:
        return ["f", float.hex(value)]
    if kind is complex:
        return ["c", [float.hex(value.real), float.hex(value.imag)]]
    return ["b" if kind is bytes else "a", bytes(value).hex()]


def value_of(data: Any, found: Callable[[str, Any], Any]) -> Any:
    """The inverse of `plain`. found: called with the tag and content of what is no data."""
    if data is None or isinstance(data, (bool, int, str)):
        return data
    tag, content = data[0], data[1]
    if tag in "ltszq":
        items = [value_of(item, found) for item in content]
        return {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}[tag](items)
    match tag:
        case "d":
            return {value_of(key, found): value_of(item, found) for key, item in content}
        case "i":
            return int(content, 16)
        case "f":
            return float.fromhex(content)
        case "c":
            return complex(*map(float.fromhex, content))
        case "b":
            return bytes.fromhex(content)
        case "a":
            return bytearray.fromhex(content)
        case "n":
            return {"Fraction": fractions.Fraction, "Decimal": decimal.Decimal}[content](data[2])
        case "r":
            return range(*content)
    return found(tag, content)


class Side:
    """One end of the channel: sends requests, and answers those of the other end while it waits."""

    def __init__(self, trusted: bool) -> None:
        self.socket = socket.socket(fileno=CHANNEL)
        self.trusted = trusted
        self.kept: list[Any] = []

    def request(self, *message: Any) -> Any:
        self.send(["ask", *message])
        while True:
            received = self.receive()
            if received[0] != "ask":
                return received
            self.answer(received[1:])

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        try:
            self.socket.sendall(len(data).to_bytes(8, "big") + data)
        except OSError as error:
            raise Gone from error

    def receive(self) -> Any:
        size = int.from_bytes(self.exactly(8), "big")
        if size > LARGEST:
            raise Gone
        try:
            message = json.loads(self.exactly(size))
            known = isinstance(message, list) and message and message[0] in ("ask", "ok", "raised")
        except (ValueError, RecursionError) as error:
            raise Gone from error
        if not known:
            raise Gone
        return message

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self.socket.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise Gone from error
            if not part:
                raise Gone
            data += part
        return bytes(data)

    def pack(self, value: Any) -> Any:
        return plain(value, self.keep)

    def keep(self, value: Any) -> Any:
        """What is no data stays here; its number goes. The tests' side lets nothing but functions be called."""
        if isinstance(value, Remote):
            return ["yours", value._number]
        if self.trusted and not callable(value):
            raise TypeError(f"{type(value).__name__} cannot be passed to the program: it is no plain data")
        self.kept.append(value)
        return ["mine", len(self.kept) - 1]

    def unpack(self, data: Any) -> Any:
        return value_of(data, self.find)

    def find(self, tag: str, content: Any) -> Any:
        if tag == "yours" and 0 <= content < len(self.kept):
            return self.kept[content]
        if tag == "mine":
            return Remote(self, content)
        raise ValueError(f"unknown kind of data {tag!r:.40}")

    def answer(self, message: Any) -> None:
        """Do what the other end asks, and send the result with the arguments as they are now (a sorted list)."""
        try:
            name, *arguments = message
            if self.trusted and name != "call":
                raise PermissionError("the tests' objects can be called, nothing else")
            if name == "call":
                target, given, named = (self.unpack(part) for part in arguments)
                result = self.pack(target(*given, **named))
                reply = ["ok", result, self.pack([] if self.trusted else given)]
            elif name == "names":
                reply = ["ok", self.names(arguments[0]), []]
            else:
                reply = ["ok", self.pack(OPERATIONS[name](*map(self.unpack, arguments))), []]
        except Gone:
            raise
        except BaseException as error:
            reply = ["raised", type(error).__name__, str(error)]
        self.send(reply)

    def names(self, wanted: list[str]) -> Any:
        """Those of the program's names that the tests use. A module is sent by name: the tests import their own."""
        space = vars(sys.modules["solution"])
        found = {name: space[name] for name in wanted if name in space}
        modules = {name: value.__name__ for name, value in found.items() if isinstance(value, types.ModuleType)}
        return [modules, {name: self.pack(value) for name, value in found.items() if name not in modules}]

    def result(self, reply: Any, given: Any = ()) -> Any:
        """A reply as a value or an exception; lists and dicts that the program has changed are changed here too."""
        try:
            if reply[0] == "raised":
                kind = getattr(builtins, str(reply[1]), None)
                known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
                raise (kind(str(reply[2])) if known else RemoteError(f"{reply[1]}: {reply[2]}"))  # pyright: ignore
            changed = self.unpack(reply[2]) if given else []
            value = self.unpack(reply[1])
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            if reply[0] == "raised":
                raise
            raise Gone from error
        for old, new in zip(given, changed, strict=False):
            if type(old) is type(new) and old != new:
                update(old, new)
        return value


def update(old: Any, new: Any) -> None:
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set, collections.deque)):
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)


class Remote:
    """Stand-in for an object of the other end: a function, a class, an instance, an iterator."""

    def __init__(self, side: Side, number: int) -> None:
        self.__dict__.update(_side=side, _number=number)

    def __call__(self, *given: Any, **named: Any) -> Any:
        side = self._side
        return side.result(side.request("call", side.pack(self), side.pack(given), side.pack(named)), given)

    def _do(self, name: str, *arguments: Any) -> Any:
        side = self._side
        return side.result(side.request(name, side.pack(self), *map(side.pack, arguments)))

    def __getattr__(self, name: str) -> Any:
        return self._do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name, value)

    def __eq__(self, other: object) -> bool:
        """Two objects of the program are compared there, an object of the program never equals data of the tests."""
        return isinstance(other, Remote) and self._do("eq", other) is True

    __hash__ = object.__hash__

    def __iter__(self) -> Any:
        return self._do("iter")

    def __len__(self) -> int:
        return self._do("len")

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> Any:
        return self._do("next")

    def __str__(self) -> str:
        return self._do("str")

    def __repr__(self) -> str:
        return self._do("repr")

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("put", key, value)

    def __delitem__(self, key: Any) -> None:
        self._do("delete", key)

    def __contains__(self, item: Any) -> bool:
        """By what it yields, each compared here: an object that says it holds everything does not."""
        return any(item == each for each in self)

    def _order(self, name: str, other: Any) -> Any:
        """Objects of the program are ordered there; none is more or less than data of the tests because it says so."""
        if not isinstance(other, Remote):
            raise TypeError("the program returned an object where the tests compare with plain data")
        return self._do(name, other)

    def __lt__(self, other: Any) -> Any:
        return self._order("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._order("le", other)

    def _arithmetic(self, name: str, other: Any) -> Any:
        """With data of the tests it makes another object, never data: that would be an answer made from theirs."""
        result = self._do(name, other)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            raise TypeError("the program returned an object where the tests compute with plain data")
        return result

    def __add__(self, other: Any) -> Any:
        return self._arithmetic("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._arithmetic("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._arithmetic("mul", other)

    def __enter__(self) -> Any:
        return self._do("enter")

    def __exit__(self, *_: object) -> None:
        self._do("leave")


def serve(source: str) -> None:
    """The program's process: run it as a module, then answer. It may do what it likes here, answers included."""
    side = Side(trusted=False)
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(source, "solution.py", "exec"), vars(module))
    while True:
        message = side.receive()
        side.answer(message[1:])


def used_as_modules(tree: ast.AST) -> set[str]:
    """Names of the standard library that the tests use as `math.isclose` and in no other way.

    The tests get the real module whatever the program calls so: else its own `math` would decide.
    """
    attributes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bases = [node for node in attributes if isinstance(node, ast.Name)]
    other = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in bases}
    return {node.id for node in bases} & (sys.stdlib_module_names - other)


def check(tests: str, entry_point: str | None) -> bool:
    """The tests' process: run them against the stand-ins. True where they all held."""
    side = Side(trusted=True)
    tree = ast.parse(tests, "tests.py")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | (
        {entry_point} if entry_point else set()
    )
    wanted = sorted(name for name in used if name and not hasattr(builtins, name) and not name.startswith("__"))
    modules, others = side.request("names", wanted)[1]
    own = used_as_modules(tree) - {entry_point}
    space: dict[str, Any] = {"__name__": "tests"} | {name: __import__(name) for name in own}
    for name, module in modules.items():
        if name in wanted and name not in own and module in sys.stdlib_module_names:
            space[name] = __import__(module)
    space |= {name: side.unpack(data) for name, data in others.items() if name in wanted and name not in own}
    exec(compile(tree, "tests.py", "exec"), space)
    if entry_point and "check" in space and not isinstance(space["check"], Remote):
        space["check"](space[entry_point])
    for name, value in list(space.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            value()
    return True


def verdict(tests: str, entry_point: str | None) -> str:
    """One word for the reward: passed, failed (a test did not hold) or gone (the program was no longer there)."""
    try:
        word = "passed" if check(tests, entry_point) else "failed"
    except BaseException:
        word = "failed"
    return "gone" if Gone.happened else word


def main() -> None:
    job = json.loads(sys.stdin.read())
    if job["role"] == "serve":
        serve(job["source"])
        return
    out = os.dup(1)
    os.dup2(2, 1)  # what the tests print is not the verdict
    os.write(out, verdict(job["tests"], job["entry_point"]).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
