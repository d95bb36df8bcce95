"""The `code` term: does the response's program pass its unit tests? Owns how a response and a record become one
program; running it is the sandbox's.

The code of a response is its first closed ``` fence, else the whole response. Records say what is tested:
- HumanEval: `prompt` (the stub), `entry_point`, `test` (source that defines `check(candidate)`). Code that defines the
  entry point replaces the stub and keeps what stands above it (imports, helpers); other code continues the stub, and
  ends where a model that runs on begins its next top-level statement.
- lists: `tests` (or MBPP's `test_list`) of assert statements, run in order after the code and `test_setup_code`.
"""

import re
from collections.abc import Mapping
from typing import Any

from actors.rewards.options import RewardTerm
from actors.rewards.sandbox import Limits, run_confined
from actors.rewards.types import GradeItem, GradingError, Score

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_NEXT_STATEMENT = re.compile(r"\n(?=(?:class|def|if|print|from|import|assert)\b|#|@|```)")


def extract_code(response: str) -> tuple[str, bool]:
    """(code, whether it came from a closed fence)."""
    fence = _FENCE.search(response)
    return (fence[1], True) if fence else (response, False)


def assemble(response: str, record: Mapping[str, Any]) -> str:
    """The program to run: it passes if it reaches its end."""
    code, fenced = extract_code(response)
    if isinstance(record.get("test"), str) and isinstance(record.get("entry_point"), str):
        return _humaneval(code, fenced, record)
    tests = record.get("tests", record.get("test_list"))
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests):
        setup = record.get("test_setup_code") or ""
        return "\n\n".join([code, setup, *tests]) + "\n"
    raise GradingError(
        "the record has no tests: it needs 'tests' (a list of assert statements), or 'prompt', 'test' and "
        f"'entry_point'; it has {', '.join(sorted(record)) or 'no fields'}"
    )


def _humaneval(code: str, fenced: bool, record: Mapping[str, Any]) -> str:
    entry_point = record["entry_point"]
    stub = record.get("prompt", "")
    if not isinstance(stub, str) or not entry_point.isidentifier():
        raise GradingError("a HumanEval record needs text in 'prompt' and a function name in 'entry_point'")
    definition = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{entry_point}\b", re.MULTILINE)
    if definition.search(code):
        start = definition.search(stub)
        code = stub[: start.start() if start else 0] + "\n" + code
    else:
        code = stub + (code if fenced else _NEXT_STATEMENT.split(code, maxsplit=1)[0])
    return f"{code}\n\n{record['test']}\n\ncheck({entry_point})\n"


class CodeTerm:
    """Grades programs by their unit tests; value 1.0 if all pass, else 0.0."""

    def __init__(self, options: RewardTerm) -> None:
        self._limits = Limits(timeout_s=options.timeout_s, memory_bytes=options.memory_mb << 20)

    def score(self, item: GradeItem) -> Score:
        verdict = run_confined(assemble(item.response, item.record), self._limits)
        if verdict.confinement is None:
            raise GradingError(f"the confined interpreter did not start: {verdict.message}")
        return Score(float(verdict.passed), verdict.message or None)

    def close(self) -> None:
        """Nothing outlives a call."""
