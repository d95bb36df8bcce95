"""Main program of DeadlineChild: answers requests on stdin with one JSON line each on stdout. Run by path; never
imported by Paceline, and imports none of it, so that it starts fast.

Kinds: `symbolic` (gold, answer, decimals) -> bool by math-verify, None if the gold answer is no expression and no
words; `pattern` text -> bool; `function` responses -> an outcome for each, by the user's function (calling.py);
`signature` of such a function -> what it asks for.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def symbolic(_: str) -> Callable[[Any], bool | None]:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import NormalizationConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every expression that it cannot read
    # Without its units, which take letters away: it reads 2 - c as "2 -", and 4m as 4.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)

    def equal(question: tuple[str, str, int]) -> bool | None:
        # No timeouts of its own: they need the main thread's SIGALRM, which is this process's last resort (below).
        # Only LaTeX: the prose reader would take a number out of an expression that cannot be parsed.
        *texts, places = question
        gold, answer = (parse(rf"\boxed{{{text}}}", [latex], parsing_timeout=0) for text in texts)
        if verify(gold, answer, float_rounding=places, timeout_seconds=0):
            return True
        readable = any(not isinstance(form, str) for form in gold) or any(part.isalpha() for part in texts[0].split())
        return False if readable else None

    equal(("x+1", "1+x", 6))  # what this fills (the parser's tables, sympy's caches) every fork then has
    return equal


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


@functools.cache
def _calling() -> Any:
    """The module beside this one, without the package around it, which imports much that a function does not need."""
    spec = importlib.util.spec_from_file_location("paceline_calling", Path(__file__).with_name("calling.py"))
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
        answers.write(b'{"forked": true}\n')


def main() -> None:
    kind, setup = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a function prints goes to the log, not into the answers
    sys.stdout = sys.stderr  # line by line: this process ends by SIGKILL, which takes what is buffered with it
    sys.path[:] = setup["path"]
    if setup["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_mb"] << 20,) * 2)

    def answer(make: Callable[[], Any]) -> Any:
        """Answers with the value, or with the exception as text; returns the value."""
        try:
            value = make()
            payload = {"value": None if callable(value) else value}
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            value = None
            if kind in ("function", "signature"):
                _, text, trace = _calling().told(error)
                payload = {"error": text, "trace": trace}
            else:
                payload = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(payload).encode() + b"\n")
        return value

    kinds: dict[str, Callable[[str], Callable[[Any], Any]]] = {
        "symbolic": symbolic,
        "pattern": pattern,
        "function": function,
        "signature": signature,
    }
    compute = answer(lambda: kinds[kind](setup["argument"]))
    if compute is None:
        return
    if setup["forks"]:
        stay_behind(answers)
    while header := sys.stdin.buffer.read(8):
        timeout_s, argument = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        # The default action of SIGALRM ends even a loop in C: nothing outlives a parent that was killed meanwhile.
        signal.alarm(math.ceil(timeout_s) + 5)
        answer(partial(compute, argument))
        signal.alarm(0)


if __name__ == "__main__":
    main()
