"""The program under test. Owns its interpreter: loads the program, serves the judge's requests, runs it as a script.

This process never holds a test, an expected value or a verdict: a program can change only its own answers. The program
may do anything; nothing that it raises leaves a request unanswered.
"""

# ruff: noqa: PTH108
# (Every import delays every graded program: no pathlib.)
import io
import json
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from . import wire

RECURSION_LIMIT = 50_000
MAX_OUTPUT_BYTES = 8 << 20
# Names that public records with inputs and outputs presume: their solutions use them without an import.
PRELUDE = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip


def _call(function: Any, arguments: Any, named: dict[str, Any]) -> Any:
    return function(*arguments, **named)


def _equal(left: Any, right: Any) -> bool:
    """Compare two objects of the program. An object that equals anything at all equals nothing."""
    return bool(left == right) and not left == object() and not object() == right  # noqa: SIM201


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "equal": _equal,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    **{function.__name__: function for function in (bool, len, iter, next, str, repr, dir)},
    **{
        name: getattr(operator, f"__{name}__")
        for name in (
            "getitem", "setitem", "delitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and",
            "or", "xor", "lt", "le", "gt", "ge", "neg", "abs",
        )
    },
}  # fmt: skip


class Candidate:
    """Answers requests about one program until the judge has ended."""

    def __init__(self, job: dict[str, Any], requests: int, answers: int) -> None:
        self._code: str = job["code"]
        self._prelude: bool = job["prelude"]
        self._requests, self._answers = requests, answers
        self._kept: list[Any] = []
        self._references: dict[int, int] = {}  # by the id of a kept object; keeping it makes the id unique
        self._module = types.ModuleType("candidate")  # a real module: dataclasses and pickle look it up by name
        self._given: dict[str, Any] = {}  # names that the program has without defining them
        self._compiled: types.CodeType | None = None

    def serve(self) -> None:
        """Serve requests. EOFError when the judge has ended; returns in a fork that must run the program as a
        script."""
        own_pid = os.getpid()
        while True:
            payload = wire.receive(self._requests)
            reply = self._reply(payload)
            if reply is None:
                return
            if os.getpid() != own_pid:  # a fork by the program, which returned from the request
                os._exit(0)
            wire.send(self._answers, reply)

    def _reply(self, payload: bytes) -> bytes | None:
        """Return the answer as a frame; None in a script's fork."""
        try:
            operation, arguments = self._load(payload)
            changed: list[Any] = []
            value: Any = None
            match operation:
                case "load":
                    self._execute()
                case "get":
                    value = self._own(arguments[0])
                case "compile":
                    self._compile()
                case "script":
                    value = self._script(arguments[0])
                    if value is None:
                        return None
                case "call":
                    value = _call(*arguments)
                    changed = self._changed(payload, arguments[1])
                case _:
                    value = OPERATIONS[operation](*arguments)
            return json.dumps(["value", wire.encode(value, self._keep), changed]).encode()
        except StopIteration:
            return b'["stop"]'
        except BaseException as error:
            # Includes out of memory, recursion and exit: the judge decides what follows.
            return self._raised(error)

    def _raised(self, error: BaseException) -> bytes:
        """Return the exception's type, its arguments where they can be sent, and its text."""
        explained = wire.explain(error)
        try:
            kind = wire.encode(type(error), self._keep)
            arguments = wire.encode(list(error.args), self._keep)
            return json.dumps(["raise", kind, arguments, explained]).encode()
        except BaseException:  # out of memory, too deep
            return json.dumps(["raise", ["error", [[type(error).__name__, None]]], ["list", []], explained]).encode()

    def _compile(self) -> None:
        self._compiled = compile(self._code, wire.PROGRAM, "exec", dont_inherit=True)
        if self._prelude:
            _import_prelude({})  # now, so that the later forks share it

    def _execute(self) -> None:
        self._compile()
        assert self._compiled is not None
        sys.modules["candidate"] = self._module
        if self._prelude:
            _import_prelude(self._given)
            self._module.__dict__.update(self._given)
        exec(self._compiled, self._module.__dict__)

    def _own(self, name: str) -> Any:
        """Return a name that the program itself defines."""
        value = self._module.__dict__[name]
        if name in self._given and self._given[name] is value:
            raise KeyError(name)
        return value

    def _keep(self, value: Any) -> int:
        if id(value) not in self._references:
            self._references[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._references[id(value)]

    def _load(self, payload: bytes) -> Any:
        unpickler = _ProxyUnpickler(io.BytesIO(payload))
        unpickler.kept = self._kept
        return unpickler.load()

    def _changed(self, payload: bytes, arguments: tuple[Any, ...]) -> list[Any]:
        """Return [position, new value] of the arguments that the call changed in place."""
        if not any(isinstance(value, list | dict | set | bytearray) for value in arguments):
            return []
        before = self._load(payload)[1][1]
        return [
            [i, wire.encode(now, self._keep)]
            for i, (now, then) in enumerate(zip(arguments, before, strict=True))
            if isinstance(now, list | dict | set | bytearray) and now != then
        ]

    def _script(self, text: str) -> list[Any] | None:
        """Run once; return [exit code, printed text, last line of the errors], or None in the fork that must run it."""
        files = []
        for name in (".stdin", ".stdout", ".stderr"):
            files.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
            os.unlink(name)
        with os.fdopen(os.dup(files[0]), "wb") as stream:
            stream.write(text.encode(errors="surrogateescape"))
        os.lseek(files[0], 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            os.close(self._requests)
            os.close(self._answers)
            return None
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed, errors = (os.pread(file, MAX_OUTPUT_BYTES + 1, 0) for file in files[1:])
        for file in files:
            os.close(file)
        if len(printed) > MAX_OUTPUT_BYTES:
            raise ValueError(f"the program printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-wire.MESSAGE_CHARS :]
        return [code, printed.decode(errors="replace"), last]

    def run_as_main(self) -> None:
        """Run like `python solution.py`: its exit handlers run when this process ends."""
        assert self._compiled is not None
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, ["solution.py"]
        if self._prelude:
            _import_prelude(main.__dict__)
        exec(self._compiled, main.__dict__)


def _import_prelude(namespace: dict[str, Any]) -> None:
    for name in PRELUDE:
        module = __import__(name)
        namespace.update((key, value) for key, value in vars(module).items() if not key.startswith("_"))
    namespace.update((name, sys.modules[name]) for name in PRELUDE)
    sys.setrecursionlimit(RECURSION_LIMIT)


class _ProxyUnpickler(pickle.Unpickler):
    """Loads the judge's messages; references become the kept objects."""

    kept: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.kept[pid]
