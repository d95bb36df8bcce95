"""The `code` term: whether the response's program passes its tests. Owns how a response and a record become one program
and its tests. extraction.py finds the code in a response, forms.py reads the tests, and the sandbox runs them.

HumanEval's records have a stub. Code that defines the entry point replaces the stub and keeps the lines above the entry
point (imports, helpers). Other code continues the stub, and ends before the next top-level statement.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.rewards.boxed import thinks
from actors.rewards.extraction import extract_code, without_demonstration, without_prose
from actors.rewards.forms import read_tests, source_tests
from actors.rewards.sandbox import Limits, Trial, run_confined
from config.rewards import RewardTerm
from contracts.rewards import BadRecordError, GradeItem, GradingError, Score

_NEXT_STATEMENT = re.compile(r"\n(?=(?:class|def|if|print|from|import|assert)\b|#|@|```)")
_METHOD = re.compile(r"(\w+)\(\)\.(\w+)")


def assemble(
    response: str, record: Mapping[str, Any], which: str = "last", *, thinking: bool = False
) -> tuple[str, Trial]:
    """Return (program, tests); `which` and `thinking` as in extract_code. GradingError if the record has no tests,
    BadRecordError if they cannot be run."""
    code, fenced = extract_code(response, which, thinking=thinking)
    if isinstance(record.get("test"), str) and isinstance(record.get("entry_point"), str):
        return _humaneval(code, fenced, record)
    tests = read_tests(record)
    if tests is None:
        raise GradingError(
            "the record has no tests: it needs 'tests' (a list of assert statements), 'inputs' and 'outputs', or "
            "'prompt', 'test' and 'entry_point' (docs/reference/grading.md has all forms); it has "
            f"{', '.join(sorted(record)) or 'no fields'}"
        )
    if not fenced:
        code = without_prose(code)
    if tests.kind == "scripts":
        return code, tests
    if tests.kind == "calls":
        tests = replace(tests, method=re.search(r"^class[ \t]+Solution\b", code, re.MULTILINE) is not None)
    return without_demonstration(code), tests


def _humaneval(code: str, fenced: bool, record: Mapping[str, Any]) -> tuple[str, Trial]:
    entry_point, stub = record["entry_point"], record.get("prompt", "")
    method = _METHOD.fullmatch(entry_point)
    if not isinstance(stub, str) or not (entry_point.isidentifier() or method):
        raise BadRecordError(
            "a HumanEval record needs text in 'prompt' and a function's name, or Solution().name, in 'entry_point'"
        )
    name, kind = (method[1], "class") if method else (entry_point, "def")
    definition = re.compile(rf"^(?:async[ \t]+)?{kind}[ \t]+{name}\b", re.MULTILINE)
    if not fenced and (prose := without_prose(code)) != code and definition.search(prose):
        code = prose
    start = definition.search(stub)
    if definition.search(code):
        head = stub[: start.start()] if start else stub if method else ""
        code = head + "\n" + without_demonstration(code)
    else:
        code = stub + (code if fenced else _NEXT_STATEMENT.split(code, maxsplit=1)[0])
    tests = f"{record['test']}\n\ncheck({entry_point})\n"
    return code, source_tests(tests, stub=_definitions(stub, start), entry_point=name)


def _definitions(stub: str, start: re.Match[str] | None) -> str:
    """Return the stub's definitions for the tests: all above the entry point, which is the program's."""
    return stub[: start.start()] if start else stub


class CodeTerm:
    """Grades programs by their tests; value 1.0 if all pass, else 0.0."""

    def __init__(self, options: RewardTerm) -> None:
        self._which = options.answer
        self._limits = Limits(timeout_s=options.timeout_s, memory_bytes=options.memory_mb << 20)

    def score(self, item: GradeItem) -> Score:
        where = f"{item.where}: " if item.where else ""
        try:
            thinking = thinks(item.prompt)
            code, tests = assemble(item.response, item.record, self._which, thinking=thinking)
        except BadRecordError as error:
            raise BadRecordError(f"{where}{error}") from error
        verdict = run_confined(code, self._limits, tests)
        if verdict.confinement is None:
            raise GradingError(f"the confined interpreter did not start: {verdict.message}")
        if verdict.ungradable:
            raise BadRecordError(f"{where}{verdict.message}")
        return Score(float(verdict.passed), verdict.message or None)

    def close(self) -> None:
        """Do nothing: nothing outlives a call."""
