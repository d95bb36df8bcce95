"""Runs the tests of one record against a program and decides whether all passed. Owns the verdict.

The tests come from the data and run here; the program runs in another process, and only data comes back. Three kinds of
tests: source (asserts, or functions that assert), calls with an expected value each, and scripts with standard input
and an expected output each.
"""

import importlib
import sys
import traceback
import types
from typing import Any

from . import wire
from .compare import first_difference, number_keys, refuse_empty_arrays, same_text, same_value
from .remote import CandidateLink, ProgramEndedError, UngradableError

TESTS = "<tests>"  # file name of the tests' source in tracebacks


class WrongAnswerError(Exception):
    """A test has failed."""


def judge(job: dict[str, Any], link: CandidateLink) -> dict[str, Any]:
    """Return the verdict, with the job's token if every test passed. Raises nothing."""
    token = job.pop("token")
    source = job.get("source", "")
    try:
        match job["kind"]:
            case "source":
                _source(job, link)
            case "calls":
                _calls(job, link)
            case "scripts":
                _scripts(job, link)
            case kind:
                raise UngradableError(f"unknown kind of tests {kind!r}")
    except UngradableError as error:
        return {"token": None, "message": str(error)[: wire.MESSAGE_CHARS], "ungradable": True}
    except BaseException as error:  # the tests are foreign code: they may exit, recurse or use up the memory
        return {"token": None, "message": _reason(error, source)}
    return {"token": token, "message": ""}


def _source(job: dict[str, Any], link: CandidateLink) -> None:
    """Run source tests. The stub's helpers are the judge's own; other names in the tests come from the program."""
    borrowed = _borrow(job["borrowed"])  # before the program is loaded, so that it cannot interfere
    if any("numpy" in text for text in (job["source"], job["stub"], *borrowed)) or "np" in borrowed:
        refuse_empty_arrays()
    link.ask("load")
    module = types.ModuleType("candidate")  # as in the program: instances of the stub's classes can be sent to it
    sys.modules["candidate"] = module
    namespace = module.__dict__
    if job["stub"]:
        exec(compile(job["stub"], "<stub>", "exec", dont_inherit=True), namespace)
    sys.modules["solution"] = _Solution(link, borrowed)
    for name in job["names"]:
        try:
            namespace[name] = link.ask("get", name)
        except KeyError:
            continue  # the test that uses it raises NameError
    namespace.update(borrowed)
    before = set(namespace)
    exec(compile(job["source"], TESTS, "exec", dont_inherit=True), namespace)
    for name in [n for n in namespace if n.startswith("test") and n not in before]:
        if isinstance(function := namespace[name], types.FunctionType) and function.__code__.co_argcount == 0:
            function()


def _borrow(names: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the modules, and attributes of modules, that the tests use without importing them."""
    found = {}
    for name, dotted in names:
        module, _, attribute = dotted.partition(":")
        try:
            found[name] = importlib.import_module(module)
            if attribute:
                found[name] = getattr(found[name], attribute)
        except BaseException as error:
            raise UngradableError(f"the tests need {dotted.replace(':', '.')}: {error!r:.200}") from error
    return found


class _Solution(types.ModuleType):
    """The module of `from solution import f`, with which some tests begin. Names that the tests only compare with are
    not the program's."""

    def __init__(self, link: CandidateLink, borrowed: dict[str, Any]) -> None:
        super().__init__("solution")
        self._link = link
        self.__dict__.update(borrowed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._link.ask("get", name)
        except KeyError:
            raise AttributeError(f"the program defines no {name!r}") from None


def _calls(job: dict[str, Any], link: CandidateLink) -> None:
    link.ask("load")
    name = job["function"]
    try:
        function = link.ask("get", "Solution")().__getattr__(name) if job["method"] else link.ask("get", name)
    except (KeyError, AttributeError):
        raise WrongAnswerError(f"the program defines no {'method' if job['method'] else 'function'} {name!r}") from None
    for number, (arguments, expected) in enumerate(job["cases"], start=1):
        call = [number_keys(value) if isinstance(value, dict) else value for value in arguments]
        returned = function(*call)
        # Old records wrap the expected value in a list of one.
        wrapped = isinstance(expected, list) and len(expected) == 1
        if not same_value(returned, expected) and not (wrapped and same_value(returned, expected[0])):
            shown = f"returned {returned!r:.100} where {expected!r:.100} is expected"
            raise WrongAnswerError(f"test {number}: {shown}")


def _scripts(job: dict[str, Any], link: CandidateLink) -> None:
    link.ask("compile")
    for number, (text, expected) in enumerate(job["cases"], start=1):
        code, printed, error = link.ask("script", text)
        if code != 0:
            raise WrongAnswerError(f"test {number}: exit status {int(code)}: {error!s:.400}")
        if not same_text(printed, expected):
            raise WrongAnswerError(f"test {number}: {first_difference(printed, expected)}")


def _reason(error: BaseException, source: str) -> str:
    """Return the program's own error message; otherwise the failed test."""
    if isinstance(explained := getattr(error, "explained", None), str):
        return explained
    if isinstance(error, WrongAnswerError | ProgramEndedError):
        return str(error)[: wire.MESSAGE_CHARS]
    text = "".join(traceback.format_exception_only(error)).strip()[-wire.MESSAGE_CHARS :]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TESTS]
    written = source.splitlines()
    if lines and lines[-1] is not None and lines[-1] <= len(written):
        return f"{text} (in the test: {written[lines[-1] - 1].strip()[:200]})"
    return text
