"""Records as public data sets have them, and what the harnesses that came with them decide."""

import base64
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.confinement.compare import same_text, same_value
from actors.rewards.forms import read_tests
from config.rewards import RewardOptions, RewardTerm

ADDS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUBTRACTS = ADDS.replace("a + b", "a - b")
PAIRS = {"inputs": ["1 2\n", "5 7"], "outputs": ["3\n", "12"]}
LISTED = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALL = {"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [[3], [0]]}
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x)"
DATA = "3 + 4j, {1, 2}, frozenset({1}), b'x', range(3), 2 ** 100, float('inf'), None, {1: 'a'}"
METHOD = "```python\nclass Solution:\n    def add(self, a: int, b: Optional[int]) -> int:\n        return a + b\n```"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="code", timeout_s=20),)))
    yield made
    made.close()


def grade(grader: Grader, response: str, record: Mapping[str, Any]) -> Grade:
    return grader.grade(GradeItem(prompt="", response=response, record=record))


def private(cases: object) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


@pytest.mark.parametrize(
    "record",
    [
        PAIRS,
        {"input_output": json.dumps(PAIRS)},  # APPS, TACO
        {"input_output": {"inputs": [["1 2"]], "outputs": [["3"]]}},  # lists of lines
        {"reward_model": {"style": "rule", "ground_truth": json.dumps(PAIRS)}},  # verl
        {"answer": json.dumps(PAIRS)},
        {"tests": LISTED},
        {"ground_truth": json.dumps(LISTED)},  # rllm
        {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", **LISTED[0]}]}
            )
        },
        {"public_test_cases": json.dumps(LISTED), "private_test_cases": private(LISTED)},  # LiveCodeBench
        {
            "public_tests": {"input": ["1 2"], "output": ["3"]},  # CodeContests
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["4 4"], "output": ["8"]},
        },
    ],
)
def test_inputs_and_outputs(grader: Grader, record: dict[str, Any]) -> None:
    assert grade(grader, ADDS, record) == Grade(value=1.0, parts={"code": 1.0})
    got = grade(grader, SUBTRACTS, record)
    assert (got.value, got.error) == (0.0, None)
    assert got.notes == ("code: test 1: printed '-1' where '3' is expected",)


@pytest.mark.parametrize(
    "record",
    [
        CALL,
        {"input_output": json.dumps({**CALL, "outputs": [3, 0]})},
        {"input_output": json.dumps({"fn_name": "add", "inputs": ["1\n2", "0\n0"], "outputs": ["3", "0"]})},
        {
            "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "add"}),
        },
        {"tests": [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]},
        {
            "entry_point": "Solution().add",
            "prompt": "from typing import *\n",
            "test": "def check(f):\n    assert f(a=1, b=2) == 3\n",
        },
        {"tests": {"functional": "def check(f):\n    assert f(a=1, b=2) == 3\n\ncheck(Solution().add)"}},
    ],
)
def test_calls_of_a_function_or_of_a_method_of_solution(grader: Grader, record: dict[str, Any]) -> None:
    for good in (METHOD,) if "Solution" in str(record) else (ADD, METHOD):
        got = grade(grader, good, record)
        assert (got.value, got.error, got.notes) == (1.0, None, ())
        assert grade(grader, good.replace("a + b", "a - b"), record).value == 0.0
        assert grade(grader, good.replace("add", "plus"), record).value == 0.0


@pytest.mark.parametrize(
    ("program", "text", "printed"),
    [
        ("import sys\nfor line in sys.stdin: print(line.strip())", "a\nb\n", "a\nb"),
        ("import sys\nprint(*sys.stdin.read().split())\nsys.exit(0)", "1\n2", "1 2"),
        ("def main():\n    print(open(0).read())\nif __name__ == '__main__': main()", "x", "x"),
        ("import os\nos.write(1, b'x')\nos._exit(0)", "", "x"),
        ("import atexit\natexit.register(lambda: print('last'))\nprint('first')", "", "first\nlast"),
        ("import threading\nthreading.Thread(target=lambda: print('x')).start()", "", "x"),
        ("import sys\ninput = sys.stdin.readline\nprint(int(input()) * 2)", "4", "8"),
        ("print(Counter(input()).most_common(1)[0][0], gcd(4, 6))", "aab", "a 2"),  # imported by the harnesses
        ("print(10 ** 5000)", "", "1" + "0" * 5000),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "", "20000"),
        ("print('\u00e4')", "", "\u00e4"),
        ("print(input())", "\u00e4", "\u00e4"),
    ],
)
def test_programs_are_run_as_scripts(grader: Grader, program: str, text: str, printed: str) -> None:
    got = grade(grader, f"```python\n{program}\n```", {"inputs": [text, text], "outputs": [printed, printed]})
    assert (got.value, got.notes) == (1.0, ())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('no')", "test 1: exit status 1: ValueError: no"),
        ("print('x')\nraise SystemExit(3)", "test 1: exit status 3"),
        ("print('x' * (9 << 20))", "printed more than 8 MiB"),
        ("x = (", "SyntaxError"),
        ("input()\ninput()", "EOFError"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
    ],
)
def test_scripts_that_fail_say_why(grader: Grader, program: str, words: str) -> None:
    got = grade(grader, f"```python\n{program}\n```", {"inputs": ["x"], "outputs": ["x"]})
    assert (got.value, got.error) == (0.0, None)
    assert words in got.notes[0]


def test_a_script_leaves_nothing_to_the_next(grader: Grader) -> None:
    program = "import os, builtins\nassert not os.path.exists('left') and not hasattr(builtins, 'left')\n"
    program += "builtins.left = 1\nopen('left2', 'w').close()\nprint(input())"
    got = grade(grader, f"```python\n{program}\n```", {"inputs": ["1", "2"], "outputs": ["1", "2"]})
    assert got.value == 1.0, got.notes


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1  2 \n\n", " 1 2\n", True),
        ("1\n\n2", "1\n2", True),
        ("1 2", "1\n2", False),
        ("1 2 3", "1 2", False),
        ("2.0", "2", True),
        ("0.3333333", "0.333333333", True),
        ("0.3334", "0.333333333", False),
        ("50000000000000001", "50000000000000000", False),
        ("1000001", "1000000", False),
        ("YES", "yes", False),
        ("2 1", "1 2", False),
        ("nan", "1.0", False),
        ("", "", True),
        ("x", "", False),
    ],
)
def test_printed_text(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([(1, 2), (3, 4)], [[1, 2], [3, 4]], True),
        ([1, 2], [2, 1], False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.1, 3, False),
        (True, True, True),
        ("a", "a", True),
        ({1: "a"}, {"1": "a"}, True),
        ({"x": (1,)}, {"x": [1]}, True),
        ({"x": 1}, {"y": 1}, False),
        (None, None, True),
        (None, [], False),
        ({1, 2}, [1, 2], False),
    ],
)
def test_returned_values(returned: object, expected: object, same: bool) -> None:
    assert same_value(returned, expected) is same


def test_mbpp_as_google_ships_it(grader: Grader) -> None:
    """Task 82: the tests use a module that only `test_imports` names, or nobody."""
    tests = ["assert math.isclose(volume_sphere(10), 4188.790204786391, rel_tol=0.001)"]
    response = "```python\ndef volume_sphere(r):\n    return 4 / 3 * 3.141592653589793 * r ** 3\n```"
    for record in ({"test_imports": ["import math"], "test_list": tests}, {"test_list": tests}):
        assert grade(grader, response, record).value == 1.0
        assert grade(grader, response.replace("3.14", "3.24"), record).value == 0.0
        forged = response.replace("def vol", "class math:\n    isclose = lambda *a, **k: True\ndef vol")
        assert grade(grader, forged.replace("3.14", "3.24"), record).value == 0.0


@pytest.mark.parametrize(
    ("code", "tests", "value"),
    [
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25", 1.0),  # a built-in's name
        ("def sum(a, b): return 0", "assert sum(10, 15) == 25", 0.0),
        ("def f(x): return [3]\ndef set(x): return 0\ndef sorted(x): return 0", "assert set(f(1)) == set([9])", 0.0),
        (
            "class Pair:\n    def __init__(s, a, b): s.a, s.b = a, b\ndef f(ps): return max(p.b for p in ps)",
            "assert f([Pair(1, 9), Pair(2, 3)]) == 9",
            1.0,
        ),
        (
            "class Node:\n    def __init__(s, v): s.v, s.left = v, None\ndef d(n): return 1 + d(n.left) if n else 0",
            "root = Node(1)\nroot.left = Node(2)\nassert d(root) == 2",
            1.0,
        ),
        ("def f(x): x.sort()", "y = [3, 1, 2]\nf(y)\nassert y == [1, 2, 3]", 1.0),
        ("def f():\n    yield 1\n    yield 2", "assert list(f()) == [1, 2]\nassert next(f()) == 1", 1.0),
        (
            "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
            "try: f(-1)\nexcept ValueError as e: assert 'negative' in str(e)\nelse: assert False",
            1.0,
        ),
        (
            "class Bad(ValueError): pass\nclass Worse(Bad): pass\ndef f(x): raise Worse('low', x)",
            "try: f(-1)\nexcept Bad as e: assert e.args == ('low', -1)\nelse: assert False",
            1.0,
        ),
        ("def f(x): raise ValueError('no')", "try: f(-1)\nexcept ValueError as e: assert str(e) == 'no'", 1.0),
        ("def f(x): raise KeyError(x)", "try: f(-1)\nexcept KeyError as e: assert e.args == (-1,)", 1.0),
        ("class Bad(Exception): pass\ndef f(x): raise KeyError(x)", "try: f(-1)\nexcept Bad: pass", 0.0),
        ("class Bad(SystemExit): pass\ndef f(x): raise Bad(0)", "f(1)", 0.0),
        ("def f(x): return x", "try: f(-1)\nexcept ValueError as e: pass\nelse: assert False", 0.0),
        (DATACLASS, "assert f(1) == f(1) and P(1) == P(1)", 1.0),
        (DATACLASS, "assert f(1) == f(2)", 0.0),
        (
            "from collections import *\nP = namedtuple('P', 'x')\ndef f(): return Counter('aab'), P(1)",
            "assert f() == ({'a': 2, 'b': 1}, (1,))",
            1.0,
        ),
        (f"def f(): return {DATA}", f"assert f() == ({DATA})", 1.0),
        (
            "from decimal import Decimal\nimport datetime\ndef f(): return Decimal('1.5'), datetime.date(2020, 1, 2)",
            "assert str(f()[0]) == '1.5' and f()[1].day == 2",
            1.0,
        ),
        (
            "import numpy as np\ndef f(): return np.int64(3), np.arange(3)",
            "assert f()[0] == 3 and list(f()[1]) == [0, 1, 2]",
            1.0,
        ),
        ("def f(x): return x\nassert f(1) == 2\nprint(f())", "assert f(1) == 1", 1.0),  # its own, wrong, example
    ],
)
def test_what_tests_do_with_what_a_program_made(grader: Grader, code: str, tests: str, value: float) -> None:
    got = grade(grader, f"```python\n{code}\n```", {"tests": [tests]})
    assert (got.value, got.error) == (value, None), got.notes


@pytest.mark.parametrize(
    "made",
    [
        "type('E', (Exception,), {})",
        "type('E', (Exception,), {})(1)",
        "object()",
        "lambda: 0",
        "iter(())",
        "{1: [object()]}",
    ],
)
def test_what_a_program_makes_can_always_be_given_back_to_it(grader: Grader, made: str) -> None:
    """Else a program could void its record."""
    record = {"tests": ["assert g(f()) == 1", "assert g([f(), (f(),)]) == 2"]}
    code = f"```python\ndef f(): return {made}\ndef g(x): return 1\n```"
    got = grade(grader, code, record)
    assert (got.value, got.error) == (0.0, None)
    assert "assert g([f(), (f(),)]) == 2" in got.notes[0]


def test_kodcode_functions_that_assert(grader: Grader) -> None:
    source = (
        "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
    )
    record = {"test": source, "question": "Add one."}
    assert grade(grader, "```python\ndef f(x): return x + 1\n```", record).value == 1.0
    assert grade(grader, "```python\ndef f(x): return 2\n```", record).value == 0.0
    assert grade(grader, "```python\ndef g(x): return 2\n```", record).value == 0.0


def test_the_stubs_helpers_are_the_judges(grader: Grader) -> None:
    """HumanEval 32 checks roots with `poly` of its stub; a program that redefines it checks nothing."""
    stub = "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n"
    stub += "def find_zero(xs):\n    '''A root.'''\n"
    test = "def check(candidate):\n    for c in ([1, 2], [-4, 2]):\n        assert abs(poly(c, candidate(c))) < 1e-4\n"
    record = {"prompt": stub, "entry_point": "find_zero", "test": test}
    assert grade(grader, "```python\ndef find_zero(xs):\n    return -xs[0] / xs[1]\n```", record).value == 1.0
    cheat = "```python\ndef poly(xs, x):\n    return 0\n\ndef find_zero(xs):\n    return 9\n```"
    assert grade(grader, cheat, record).value == 0.0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 test inputs, but 0 outputs"),
        ({"fn_name": "f", "inputs": ["(1"], "outputs": ["1"]}, "no JSON"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "no function's name"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, "'func_name'"),
        ({"tests": ["assert ("]}, "not Python"),
        ({"tests": ["assert f(lambda: 1) == 1"]}, "cannot be sent"),
        ({"test": "def test_f(x):\n    assert f(x) == 2"}, "'test_f' that takes arguments"),
        ({"test": "async def test_f():\n    assert f(1) == 2"}, "'test_f' that takes arguments or is async"),
        ({"test": "class TestF:\n    def test(self):\n        assert f(1) == 2"}, "a class 'TestF'"),
        (
            {
                "test": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1) == 2\n"
                "if __name__ == '__main__':\n    unittest.main()"
            },
            "a class 'T'",
        ),
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(print))).decode()}, "no tests"),
    ],
)
def test_tests_that_cannot_be_run_are_the_records_fault(grader: Grader, record: dict[str, Any], words: str) -> None:
    response = "```python\ndef f(x): return x\n```"
    got = grader.grade(GradeItem(prompt="", response=response, record=record, where="train.jsonl, line 3"))
    assert (got.value, got.bad_record) == (0.0, "no tests" not in words)
    assert got.error is not None
    assert words in got.error
    if got.bad_record:
        assert got.error.startswith("code: train.jsonl, line 3: ")


def test_an_answer_that_is_no_test_is_none() -> None:
    for answer in ("42", "[1, 2]", "{1, 2}", r"\frac{1}{2}", "YWJj"):
        assert read_tests({"answer": answer}) is None
