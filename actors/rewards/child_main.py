"""The computations of DeadlineChild's process (`actors.processes.user_main` runs it): one question after another. Never
imported by Paceline, and imports nothing of it, so that it starts fast.

Kinds: `symbolic` a question about expressions -> bool, by math-verify (symbolic.py); `reasoning_gym` an answer -> its
score, by its data set (gym.py); `pattern` text -> bool; `function` responses -> one outcome each, by the user's
function (calling.py); `signature` a description of such a function -> its traits.
"""

import functools
import importlib.util
import json
import math
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.processes.user_main import Parent


def symbolic(_: str) -> Callable[[Any], Any]:
    compare: Callable[[Any], Any] = _beside("symbolic").comparison()
    return compare


def reasoning_gym(_: str) -> Callable[[Any], Any]:
    warnings.simplefilter("ignore")  # from numpy, about answers that are no numbers
    score: Callable[[Any], Any] = _beside("gym").scorer()
    return score


def pattern(expression: str) -> Callable[[Any], bool]:
    compiled = re.compile(expression, re.DOTALL)
    return lambda text: compiled.search(text) is not None


def function(described: str) -> Callable[[Any], list[Any]]:
    outcomes = _calling().UserFunction(**json.loads(described)).outcomes
    return lambda asked: list(outcomes(*asked))


def signature(_: str) -> Callable[[Any], Any]:
    def describe(described: dict[str, Any]) -> dict[str, Any]:
        return dict(_calling().UserFunction(**described).traits._asdict())

    return describe


def _calling() -> Any:
    return _beside("calling")


@functools.cache
def _beside(name: str) -> Any:
    """Load a sibling module without its package, which imports much that a child does not need."""
    spec = importlib.util.spec_from_file_location(f"paceline_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stay_behind(parent: "Parent") -> None:
    """Return in a fork of this process. This process stays, and forks again whenever a fork is killed or dies, which it
    reports by a line. SIGUSR2 kills the computing fork."""
    computing = 0

    def kill(*_: object) -> None:
        if computing:
            os.kill(computing, signal.SIGKILL)

    signal.signal(signal.SIGUSR2, kill)
    while True:
        computing = os.fork()
        if computing == 0:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            parent.forked()
            return
        _, status = os.waitpid(computing, 0)
        computing = 0
        if os.WIFEXITED(status):
            os._exit(0)  # no more questions will come
        parent.answer({"forked": os.waitstatus_to_exitcode(status)})


def main(parent: "Parent", setup: dict[str, Any]) -> None:
    kind = setup["kind"]
    if setup["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_mb"] << 20,) * 2)

    def answer(number: int, make: Callable[[], Any]) -> Any:
        """Answer question `number` with the value, or with the exception as text; return the value."""
        try:
            value = make()
            payload = {"number": number, "value": None if callable(value) else value}
        except BaseException as error:
            value = None
            if kind in ("function", "signature"):
                _, text, trace = _calling().told(error)
                payload = {"number": number, "error": text, "trace": trace}
            else:
                payload = {"number": number, "error": f"{type(error).__name__}: {error}"[:2000]}
        parent.answer(payload)
        return value

    kinds: dict[str, Callable[[str], Callable[[Any], Any]]] = {
        "symbolic": symbolic,
        "reasoning_gym": reasoning_gym,
        "pattern": pattern,
        "function": function,
        "signature": signature,
    }
    compute = answer(0, lambda: kinds[kind](setup["argument"]))
    if compute is None:
        return
    if setup["forks"]:
        stay_behind(parent)
    for number, timeout_s, argument in parent.questions():
        # The default action of SIGALRM ends even a loop in C: nothing outlives a killed parent.
        signal.alarm(math.ceil(timeout_s) + 5)
        answer(number, partial(compute, argument))
        signal.alarm(0)
