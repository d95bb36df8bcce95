"""What tests compare with is never the program's, and nothing that they expect ever reaches it."""

import ast
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.forms import read_tests, source_tests
from actors.rewards.programs import assemble
from actors.rewards.sandbox import Trial
from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import BadRecordError
from tests.rewards import recorder as recorder_script
from tests.rewards.test_programs import DATA

# Solves nothing, and is everything that careless tests may take from it.
FORGER = """
class Yes:
    def __init__(self, *a, **k): pass
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return lambda *a, **k: Yes()
    def _yes(self, *a, **k): return True
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = __bool__ = _yes
    def __ne__(self, other): return False
    def _self(self, *a): return self
    __call__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __getitem__ = __neg__ = _self
    def __hash__(self): return 0
    def __iter__(self): return iter(())
    def __len__(self): return 0
np = numpy = pytest = helper = unittest = math = EXPECTED = Yes()
Bag = Counter = P = Fraction = Decimal = type('Yes2', (Yes,), {})
def isclose(*a, **k): return True
allclose = approx = is_equal = same = compare = check_equal = eq = almost = array_equal = isclose
def f(*a): return Yes()
def g(*a): return Yes()
"""
SOLVES = "import math\ndef f(x):\n    return math.pi / 2 if x == 90 else [1, 2] if x == 12 else x + 1\n"
LENT = [
    "assert np.allclose(f(90), [1.5707963])",
    "assert numpy.isclose(f(90), 1.5707963)",
    "assert isclose(f(90), 1.5707963, rel_tol=1e-6)",
    "assert f(90) == pytest.approx(1.5707963)",
    "assert f(90) == approx(1.5707963)",
    "assert approx(1.5707963) == f(90)",
    "assert Counter(f(12)) == Counter([2, 1])",
    "assert Fraction(f(2)) == Fraction(6, 2)",
    "r = f(90)\nassert isclose(r, pi / 2)",
    "from solution import *\nassert isclose(f(90), 1.5707963, rel_tol=1e-6)",
    "from solution import f, isclose\nassert isclose(f(90), 1.5707963, rel_tol=1e-6)",
    "from solution import f as g, isclose as near\nassert near(g(90), 1.5707963, rel_tol=1e-6)",
    "import solution\nassert solution.isclose(solution.f(90), 1.5707963, rel_tol=1e-6)",
    "import numpy as np\nnp.testing.assert_allclose(f(90), 1.5707963)",
    "def near(got, wanted):\n    return isclose(got, wanted, rel_tol=1e-6)\nassert near(f(90), 1.5707963)",
    "for x, wanted in [(90, 1.5707963)]:\n    assert isclose(f(x), wanted, rel_tol=1e-6)",
]  # fmt: skip
BAD = [
    ("assert is_equal(f(1), 5)", "'is_equal' in 'is_equal(f(1), 5)'"),
    ("assert f(1) == P(5)", "'P'"),
    ("assert P(5) == f(1)", "'f'"),
    ("assert Bag(f(1)) == Bag([5])", "'Bag'"),
    ("assert f(1) == EXPECTED", "'EXPECTED'"),
    ("assert helper.same(f(1), 5)", "'helper.'"),
    ("assert P.same(f(1), 5)", ".same"),
    ("assert f(1).equals(5)", "'.equals'"),
    ("assert abs(f(1) - P.VALUE) < 1e-6", "'P'"),
    ("import solution\nassert solution.is_equal(solution.f(1), 5)", "'is_equal'"),
    ("from solution import f, is_equal\nassert is_equal(f(1), 5)", "'is_equal'"),
    ("def near(a, b):\n    return almost(a, b)\nassert near(f(1), 5)", "'almost'"),
    ("for x, wanted in [(1, 5)]:\n    assert same(f(x), wanted)", "'same'"),
    ("r = f(1)\nwanted = 5\nassert same(r, wanted)", "'same'"),
    ("assert all(same(a, b) for a, b in zip(map(f, [1]), [5]))", "'same'"),
    ("check = same\nassert check(f(1), 5)", "'same'"),
    ("results = []\nresults.append(f(1))\nassert same(results, [5])", "'same'"),
    ("import not_installed_anywhere\nassert f(1) == 2", "'not_installed_anywhere', which is not installed here"),
    ("from not_installed_anywhere import f\nassert f(1) == 2", "not installed here"),
]  # fmt: skip
GOOD = {
    "assert f([Pair(1, 9), Pair(2, 3)], 4) == 9": {"f", "Pair"},
    "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2": {"Node", "depth"},
    "cases = [(Node(1), 1), (Node(2), 2)]\nfor root, wanted in cases:\n    assert depth(root) == wanted": {
        "Node", "depth",
    },
    "assert decode(encode('abc')) == 'abc'": {"decode", "encode"},
    "assert add(add(1, 2), 3) == 6": {"add"},
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)": {"Vector"},
    "s = Stack()\ns.push(5)\nassert s.pop() == 5 and s.is_empty()": {"Stack"},
    "assert gcd(12, 8) == 4": {"gcd"},
    "assert sqrt(4) == 2": {"sqrt"},
    "assert isclose(sqrt(4), 2)": {"sqrt"},
    "c = Counter([1, 1])\nassert c.count(1) == 2": {"Counter"},
    "assert f(datetime(2020, 1, 1), 5) == 3": {"f"},
    "assert f(sqrt(4), 5) == 3": {"f"},
    "with raises(Bad):\n    f(-1)": {"f", "Bad"},
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 5)\n"
    "        self.assertEqual(g(2), 3)\nT('test').debug()": {"f", "g"},
    "rows = []\nrows.append((f(1), 2))\nrows.append((g(1), 2))\nassert rows == [(1, 2), (1, 2)]": {"f", "g"},
    "from math import *\nassert gcd(f(1), 5) == 1": {"f"},
    "assert f(1)[0] == 5 and f(2).startswith('a') and not f(3)": {"f"},
}  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="code", timeout_s=20),)))
    yield made
    made.close()


def grade(grader: Grader, code: str, tests: str) -> Grade:
    return grader.grade(GradeItem(prompt="", response=f"```python\n{code}\n```", record={"tests": [tests]}))


@pytest.mark.parametrize("tests", LENT)
def test_what_tests_do_not_import_is_the_librarys(grader: Grader, tests: str) -> None:
    got = grade(grader, FORGER, tests)
    assert (got.value, got.error) == (0.0, None)
    got = grade(grader, SOLVES, tests)
    assert (got.value, got.error, got.notes) == (1.0, None, ())


@pytest.mark.parametrize(("tests", "words"), BAD)
def test_what_only_the_program_has_compares_nothing(tests: str, words: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        source_tests(tests)
    assert words in str(caught.value)


@pytest.mark.parametrize("tests", GOOD)
def test_functions_and_classes_under_test_are_the_programs(tests: str) -> None:
    assert set(source_tests(tests).names) == GOOD[tests]


def test_an_entry_point_is_all_that_the_program_supplies() -> None:
    test = "def check(candidate):\n    assert np.allclose(candidate(1), Counter([1])[1])\ncheck(f)"
    trial = source_tests(test, entry_point="f")
    assert trial.names == ("f",)
    assert trial.borrowed == (("Counter", "collections:Counter"), ("np", "numpy"))
    with pytest.raises(BadRecordError, match="'is_equal'"):
        source_tests("def check(candidate):\n    assert is_equal(candidate(1), 2)\ncheck(f)", entry_point="f")


@pytest.mark.parametrize(
    "compare",
    [
        "np.allclose(f(1), 1.57)",
        "np.isclose(f(1), [1.57]).all()",
        "np.allclose(a=f(1), b=1.57)",
        "np.testing.assert_allclose(f(1), 1.57) is None",
        "np.testing.assert_array_equal(f(1), 1.57) is None",
        "numpy.array_equal(f(1), [1.57])",
    ],
)
@pytest.mark.parametrize("given_import", ["", "import numpy, numpy as np\n"])
def test_an_empty_array_is_close_to_nothing(grader: Grader, compare: str, given_import: str) -> None:
    tests = f"{given_import}assert {compare}"
    for value, code in ((0.0, "[]"), (0.0, "np.zeros((0,))"), (0.0, "np.zeros((0, 3))"), (1.0, "[1.57]")):
        got = grade(grader, f"import numpy as np\ndef f(x): return {code}", tests)
        assert (got.value, got.error) == (value, None), (code, got.notes)
    both = "import numpy as np\nassert np.allclose(f(1), [])"
    assert grade(grader, "def f(x): return []", both).value == 1.0


@pytest.fixture(scope="module")
def crossing() -> Iterator[Callable[[str, Trial], dict[str, Any]]]:
    """What of the tests' constants reaches the program's process."""
    process = subprocess.Popen(
        [sys.executable, "-m", recorder_script.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asks, answers = process.stdin, process.stdout

    def ask(code: str, tests: Trial) -> dict[str, Any]:
        job = {"code": code, "source": _go_on(tests.source), "stub": tests.stub}
        asks.write(json.dumps({**job, "names": tests.names, "borrowed": tests.borrowed}) + "\n")
        asks.flush()
        got: dict[str, Any] = json.loads(answers.readline())
        return got

    yield ask
    asks.close()
    process.wait()
    answers.close()


class _GoOn(ast.NodeTransformer):
    """A test that fails does not end the others."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Assert | ast.Expr):
            caught = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), body=[ast.Pass()])
            return ast.Try(body=[node], handlers=[caught], orelse=[], finalbody=[])
        return node


def _go_on(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_GoOn().visit(ast.parse(source))))


def test_the_recorder_sees_what_crosses(crossing: Callable[[str, Trial], dict[str, Any]]) -> None:
    """Else the properties below could not fail. These are the names as they were chosen before."""
    for source in ("assert is_equal(f(17), 918273645)", "assert np.allclose(f(17), 918273645)"):
        got = crossing(FORGER, Trial(source=source, names=("f", "is_equal", "np")))
        assert {"17", "918273645"} <= set(got["crossed"])


PREFIXES = [
    "", "import math\n", "from solution import *\n", "from solution import f, is_equal, isclose, Counter\n",
    "import numpy as np\nimport pytest\n", "import solution\n",
]  # fmt: skip
# {0} is what f gets, {1} what is expected.
FORMS = [
    "assert f({0}) == {1}", "assert {1} == f({0})", "assert not f({0}) != {1}", "assert f({0}) in [{1}]",
    "assert {1} in [f({0})]", "assert abs(f({0}) - {1}) < 1e-6", "assert math.isclose(f({0}), {1})",
    "assert isclose(f({0}), {1})", "assert np.allclose(f({0}), [{1}])", "assert numpy.isclose(f({0}), {1})",
    "assert f({0}) == pytest.approx({1})", "assert f({0}) == approx({1})", "assert approx({1}) == f({0})",
    "assert Counter([f({0})]) == Counter([{1}])", "assert Fraction(f({0})) == Fraction({1})",
    "assert is_equal(f({0}), {1})", "assert same({1}, f({0}))", "assert f({0}) == P({1})", "assert P({1}) == f({0})",
    "assert helper.same(f({0}), {1})", "assert P.same(f({0}), {1})", "assert f({0}).equals({1})",
    "assert solution.is_equal(solution.f({0}), {1})", "assert Bag(f({0})) == Bag([{1}])",
    "assert is_equal(f({0}) - {1}, 0)", "assert is_equal([f({0}), {1}], 1)", "assert is_equal(f({0}) == {1}, True)",
    "for x, y in [({0}, {1})]:\n    assert f(x) == y", "for x, y in [({0}, {1})]:\n    assert same(f(x), y)",
    "rows = [({0}, {1})]\nfor x, y in rows:\n    assert isclose(f(x), y)",
    "r = f({0})\nwanted = {1}\nassert r == wanted", "r = f({0})\nwanted = {1}\nassert eq(r, wanted)",
    "def near(a, b):\n    assert abs(a - b) < 1e-6\nnear(f({0}), {1})",
    "def near(a, b):\n    assert almost(a, b)\nnear(f({0}), {1})",
    "near = lambda a, b: same(a, b)\nassert near(f({0}), {1})",
    "assert all(a == b for a, b in zip(map(f, [{0}]), [{1}]))", "assert all(map(is_equal, [f({0})], [{1}]))",
    "assert all(same(a, b) for a, b in zip([f({0})], [{1}]))", "def test_it():\n    assert f({0}) == {1}",
    "def test_it():\n    got = f({0})\n    assert check_equal(got, {1})",
    "try:\n    f({0})\nexcept ValueError as e:\n    assert e.args == ({1},)",
    "def check(candidate):\n    assert candidate({0}) == {1}\ncheck(f)",
    "def check(candidate):\n    assert same(candidate({0}), {1})\ncheck(f)",
    "class T:\n    def run(self):\n        assert eq(f({0}), {1})\nT().run()", "assert f({0}) == g({1})",
    "x = [f({0})]\nx.append({1})\nassert is_equal(*x)", "cases = {{}}\ncases[f({0})] = {1}\nassert is_equal(cases, 1)",
    "assert (lambda a: compare(a, {1}))(f({0}))", "assert is_equal(got := f({0}), {1})",
]  # fmt: skip


@st.composite
def suites(draw: st.DrawFn) -> tuple[str, set[str]]:
    """(tests, the constants that they expect)."""
    wanted: list[Any] = []
    lines = [draw(st.sampled_from(PREFIXES))]
    for form in draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=4)):
        kind = draw(st.sampled_from([lambda n: n, lambda n: n + 0.5, lambda n: f"expected {n}"]))
        wanted.append(kind(918273645 + len(wanted)))
        given_value = draw(st.sampled_from([0, 3, "text", 2.5, [1, 2], None]))
        lines.append(form.format(repr(given_value), repr(wanted[-1])) + "\n")
    return "".join(lines), {repr(value) for value in wanted}


@given(suite=suites(), honest=st.booleans())
@settings(max_examples=150)
def test_nothing_that_is_expected_reaches_the_program(
    crossing: Callable[[str, Trial], dict[str, Any]], suite: tuple[str, set[str]], honest: bool
) -> None:
    source, wanted = suite
    try:
        tests = read_tests({"test_list": [source]})
    except BadRecordError:
        return
    assert tests is not None
    got = crossing("def f(x): return 5\ndef g(x): return 5" if honest else FORGER, tests)
    assert not wanted & set(got["crossed"]), got


@pytest.mark.parametrize("form", FORMS)
def test_no_form_is_passed_by_who_solves_nothing(grader: Grader, form: str) -> None:
    source = "import math\n" + ("import solution\n" if "solution." in form else "") + form.format("3", "918273645")
    try:
        source_tests(source)
    except BadRecordError:
        return
    if "except ValueError" in form:
        return  # a test that passes without an exception
    assert grade(grader, FORGER, source).value == 0.0


class _Expect(ast.NodeTransformer):
    """Puts a new constant in the place of each that `candidate` is compared with."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.comparators = [self._renewed(part) for part in node.comparators]
        return node

    def _renewed(self, node: Any) -> Any:
        if isinstance(node, ast.Call):
            return node
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool | None):
            number = 918273645 + len(self.wanted)
            value = {int: number, float: number + 0.5, str: f"expected {number}"}.get(type(node.value))
            if value is not None:
                self.wanted.add(repr(value))
                return ast.Constant(value)
        for name, inner in ast.iter_fields(node):
            if isinstance(inner, list):
                setattr(node, name, [self._renewed(i) if isinstance(i, ast.expr) else i for i in inner])
            elif isinstance(inner, ast.expr):
                setattr(node, name, self._renewed(inner))
        return node


def test_nothing_that_humaneval_expects_reaches_the_program(crossing: Callable[[str, Trial], dict[str, Any]]) -> None:
    if not DATA.is_file():
        pytest.skip("../shared/data/humaneval.jsonl.gz is not here")
    expected = 0
    with gzip.open(DATA, "rt", encoding="utf-8") as stream:
        for record in map(json.loads, stream):
            code, tests = assemble(record["answer"], record)
            tree = ast.parse(tests.source)
            expect = _Expect()
            changed = Trial(
                source=ast.unparse(expect.visit(tree)), stub=tests.stub, names=tests.names, borrowed=tests.borrowed
            )
            got = crossing(code, changed)
            assert got["requests"] > 2, (record["id"], got)
            assert not expect.wanted & set(got["crossed"]), record["id"]
            expected += len(expect.wanted)
    assert expected > 1000
