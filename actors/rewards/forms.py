"""Reads the tests in a data record. Owns the forms of public data sets; reads no response, runs nothing.

- HumanEval, LeetCodeDataset: `prompt` (the stub), `entry_point` (a name, or `Solution().name`), `test` (source that
  defines `check(candidate)`).
- MBPP: `test_list`, or `tests`, of assert statements, after `test_imports` and `test_setup_code`.
- KodCode: `test`, source with functions `test_...`, which may begin with `from solution import ...`.
- APPS, TACO, verl, rllm, LiveCodeBench, CodeContests: pairs of inputs and outputs, and a function's name if they are
  calls; rllm's LeetCode has source under `functional`. They may be in the record itself or in one of the fields of
  _HOLDERS, as such or as JSON text.
"""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from actors.rewards.sandbox import Trial
from actors.rewards.supplied import resolve
from contracts.rewards import BadRecordError

_HOLDERS = ("input_output", "ground_truth", "reward_model", "verification_info", "tests", "test_cases", "answer")
_SPLITS = (
    "public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases",
)  # fmt: skip


def read_tests(record: Mapping[str, Any]) -> Trial | None:
    """Return the tests, except HumanEval's, whose stub the program needs (programs.py); None if there are none."""
    listed = _parsed(record.get("tests", record.get("test_list")))
    if isinstance(listed, list | tuple) and listed and all(isinstance(test, str) for test in listed):
        imports, setup = record.get("test_imports") or "", record.get("test_setup_code") or ""
        before = [*(imports if isinstance(imports, list | tuple) else [imports]), setup]
        return source_tests("\n".join(str(part) for part in [*before, *listed]) + "\n")
    if pairs := _pairs(record):
        return pairs
    source = record.get("test")
    if isinstance(source, str) and ("assert" in source or "def test" in source):
        return source_tests(source)
    return None


@lru_cache(maxsize=64)  # one record's responses come together
def source_tests(source: str, *, stub: str = "", entry_point: str | None = None) -> Trial:
    """Return a Trial of Python source, with the names in it that only the program can supply."""
    try:
        tests = ast.parse(source)
        _require_runnable(tests)
        names, borrowed = resolve(tests, ast.parse(stub), entry_point)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadRecordError(f"the record's tests are not Python: {error}") from error
    return Trial(source=source, stub=stub, names=tuple(sorted(names)), borrowed=tuple(sorted(borrowed.items())))


def _require_runnable(tests: ast.Module) -> None:
    """Reject tests that the judge never calls; it calls functions `test...` without parameters. Uncalled tests would
    pass every program."""
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in tests.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            plain = isinstance(node, ast.FunctionDef) and ast.unparse(node.args) == ""
            if not plain and node.name not in used:
                raise BadRecordError(
                    f"the record's tests have a function {node.name!r} that takes arguments or is async, as from "
                    "pytest's parametrize and fixtures: nobody calls it here. Write it without"
                )
        elif isinstance(node, ast.ClassDef) and node.name not in used:
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            if any(name.startswith("test") for name in methods):
                raise BadRecordError(
                    f"the record's tests have a class {node.name!r} with test methods, which nobody calls here: write "
                    "functions, or call them"
                )


def _pairs(record: Mapping[str, Any]) -> Trial | None:
    """Find pairs of inputs and outputs in any of their places."""
    for holder in (record, *(_parsed(record.get(name)) for name in _HOLDERS)):
        if isinstance(holder, Mapping) and "ground_truth" in holder and holder is not record:
            holder = _parsed(holder["ground_truth"])
        if isinstance(holder, Mapping) and holder.get("inputs") and "outputs" in holder:
            function = holder.get("fn_name") or record.get("fn_name")
            return _cases(list(holder["inputs"]), list(holder["outputs"]), function)
        if isinstance(holder, Mapping) and isinstance(holder.get("functional"), str):
            return replace(source_tests(holder["functional"]), prelude=True)
        if isinstance(holder, Mapping) and isinstance(holder.get("test_cases"), list):
            holder = holder["test_cases"]
        if isinstance(holder, list) and holder and all(isinstance(case, Mapping) for case in holder):
            return _listed(holder, record)
    cases: list[Mapping[str, Any]] = []
    for split in (_parsed(record.get(name)) for name in _SPLITS):
        if isinstance(split, Mapping):
            pairs = zip(split.get("input", ()), split.get("output", ()), strict=True)
            cases += [{"input": text, "output": expected} for text, expected in pairs]
        elif isinstance(split, list):
            cases += split
    return _listed(cases, record) if cases else None


def _listed(cases: list[Any], record: Mapping[str, Any]) -> Trial | None:
    """Read LiveCodeBench's list: one mapping per test, with its type; the record may hold the function's name."""
    if not all("input" in case and "output" in case for case in cases):
        return None
    function = None
    if any(case.get("testtype", case.get("type")) in ("functional", "function_call") for case in cases):
        metadata = [case.get("metadata") for case in cases] + [_parsed(record.get("metadata"))]
        names = [data.get("func_name") for data in metadata if isinstance(data, Mapping)]
        names += [case.get("fn_name") for case in cases] + [record.get("fn_name")]
        function = next((name for name in names if name), None)
        if function is None:
            raise BadRecordError(
                "the record's tests call a function, but neither they nor 'metadata' name it ('func_name')"
            )
    return _cases([case["input"] for case in cases], [case["output"] for case in cases], function)


def _cases(inputs: list[Any], outputs: list[Any], function: Any) -> Trial:
    if len(inputs) != len(outputs):
        raise BadRecordError(f"the record has {len(inputs)} test inputs, but {len(outputs)} outputs")
    if not function:
        texts = zip(map(_text, inputs), map(_text, outputs), strict=True)
        return Trial(kind="scripts", cases=tuple(texts), prelude=True)
    if not (isinstance(function, str) and function.isidentifier()):
        raise BadRecordError(f"the record's tests call {function!r:.80}, which is no function's name")
    try:
        cases = tuple(_call(given, wanted) for given, wanted in zip(inputs, outputs, strict=True))
    except (ValueError, TypeError) as error:
        raise BadRecordError(f"the record's tests call a function with what is no JSON: {error}") from error
    return Trial(kind="calls", cases=cases, function=function, prelude=True)


def _call(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    """Return (arguments, expected value): as they are, or from LiveCodeBench's JSON with one argument per line."""
    if not isinstance(given, str):
        return list(given), wanted
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
    return arguments, json.loads(wanted) if isinstance(wanted, str) else wanted


def _text(value: Any) -> str:
    """Join the lists of lines in old records."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class _TextOnly(pickle.Unpickler):
    """Unpickler of text only: LiveCodeBench compresses its private tests as pickled text."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _parsed(value: Any) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError:
            return value
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return _parsed(_TextOnly(io.BytesIO(packed)).load())
    except Exception:  # no packed tests
        return value
