"""Main program of DeadlineChild: answers requests on stdin with one JSON line each on stdout. Run by path; never
imported by Paceline, and imports none of it, so that it starts fast.

Both are taken out of the user's way before any of the user's code runs: descriptor 0 is /dev/null then, 1 is the log,
and programs that the user starts inherit neither pipe. A process that the user's code forks off never answers.

Kinds: `symbolic` a question about expressions -> bool, by math-verify (symbolic.py); `reasoning_gym`
an answer -> its score, by its data set (gym.py); `pattern` text -> bool;
`function` responses -> an outcome for each, by the user's function (calling.py); `signature` of such a function ->
what it asks for.
"""

import functools
import importlib.util
import json
import math
import os
import pickle
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def symbolic(_: str) -> Callable[[Any], Any]:
    compare: Callable[[Any], Any] = _beside("symbolic").comparison()
    return compare


def reasoning_gym(_: str) -> Callable[[Any], Any]:
    warnings.simplefilter("ignore")  # of numpy, about answers that are no numbers
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
    """A module beside this one, without the package around it, which imports much that a child does not need."""
    spec = importlib.util.spec_from_file_location(f"paceline_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stay_behind(answers: Any) -> None:
    """Returns in a fork of this process. This process stays and makes another whenever one is killed or dies, which it
    announces by a line; SIGUSR1 kills the one that computes."""
    computing = 0

    def kill(*_: object) -> None:
        if computing:
            os.kill(computing, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, kill)
    while True:
        computing = os.fork()
        if computing == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            return
        _, status = os.waitpid(computing, 0)
        computing = 0
        if os.WIFEXITED(status):
            os._exit(0)  # nobody asks any more
        answers.write(json.dumps({"forked": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def main() -> None:
    kind, setup = sys.argv[1], json.loads(sys.argv[2])
    requests = os.fdopen(os.dup(0), "rb")  # a descriptor that no program inherits which the user's code starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a function prints goes to the log, not into the answers
    sys.stdout = sys.stderr  # line by line: this process ends by SIGKILL, which takes what is buffered with it
    sys.path[:] = setup["path"]
    if setup["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_mb"] << 20,) * 2)
    owner = os.getpid()

    def answer(number: int, make: Callable[[], Any]) -> Any:
        """Answers question `number` with the value, or with the exception as text; returns the value."""
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
        if os.getpid() != owner:
            os._exit(0)  # the user's code forked, and returned here twice
        answers.write(json.dumps(payload).encode() + b"\n")
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
        stay_behind(answers)
        owner = os.getpid()
    while header := requests.read(8):
        number, timeout_s, argument = pickle.loads(requests.read(int.from_bytes(header, "little")))
        # The default action of SIGALRM ends even a loop in C: nothing outlives a parent that was killed meanwhile.
        signal.alarm(math.ceil(timeout_s) + 5)
        answer(number, partial(compute, argument))
        signal.alarm(0)


if __name__ == "__main__":
    main()
