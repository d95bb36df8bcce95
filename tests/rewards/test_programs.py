"""From a response to a program, and HumanEval's own solutions."""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.programs import assemble
from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import BadRecordError

DATA = Path(__file__).parents[3] / "shared" / "data" / "humaneval.jsonl.gz"
STUB = "import math\n\ndef helper(x):\n    return x\n\ndef area(r):\n    '''Area of a disc.'''\n"
RECORD = {
    "prompt": STUB,
    "entry_point": "area",
    "test": "def check(candidate):\n    assert candidate(0) == 0\n    assert candidate(1) > 3\n",
}
LISTED = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="code", timeout_s=20),)))
    yield made
    made.close()


def grade(grader: Grader, response: str, record: dict[str, object]) -> Grade:
    return grader.grade(GradeItem(prompt="", response=response, record=record))


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("```python\ndef area(r):\n    return math.pi * helper(r) ** 2\n```", 1.0),  # keeps what stands above the stub
        ("```python\nimport math\ndef area(r): return math.pi * r * r\n```", 1.0),
        ("    return math.pi * r ** 2\n", 1.0),  # continues the stub
        ("    return math.pi * r ** 2\n\nprint(undefined)\n", 1.0),  # runs on
        ("    return math.pi * r ** 2\n\ndef other(:\n", 1.0),
        ("```python\n    return math.pi * r ** 2\n```", 1.0),
        ("    return r ** 2\n", 0.0),
        ("```python\ndef disc(r): return 4\n```", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
def test_humaneval_form(grader: Grader, response: str, value: float) -> None:
    got = grade(grader, response, RECORD)
    assert (got.value, got.error) == (value, None), got.notes


def test_lists_of_tests(grader: Grader) -> None:
    good, bad = "```python\ndef add(a, b): return a + b\n```", "```python\ndef add(a, b): return a * b\n```"
    for record in (LISTED, {"test_list": LISTED["tests"], "test_setup_code": "zero = 0"}):
        assert grade(grader, good, record).value == 1.0
        got = grade(grader, bad, record)
        assert (got.value, got.error) == (0.0, None)
        assert got.notes == ("code: AssertionError (in the test: assert add(1, 2) == 3)",)


@pytest.mark.parametrize("record", [{}, {"tests": []}, {"tests": "assert 1"}, {"test": "x", "prompt": "y"}])
def test_a_record_without_tests_is_an_error(grader: Grader, record: dict[str, object]) -> None:
    got = grade(grader, "x", record)
    assert got.value == 0.0
    assert got.error is not None
    assert "the record has no tests" in got.error


def test_an_entry_point_that_is_no_name_is_an_error() -> None:
    with pytest.raises(BadRecordError, match="entry_point"):
        assemble("x", {**RECORD, "entry_point": "area); print("})


def test_an_endless_program_is_wrong_and_no_error() -> None:
    made = build(RewardOptions(terms=(RewardTerm(kind="code", timeout_s=1),)))
    got = grade(made, "```python\nwhile True: pass\n```", LISTED)
    assert (got.value, got.error) == (0.0, None)
    assert got.notes == ("code: timed out after 1 s",)


@pytest.fixture(scope="module")
def humaneval() -> list[dict[str, str]]:
    if not DATA.is_file():
        pytest.skip("../shared/data/humaneval.jsonl.gz is not here")
    with gzip.open(DATA, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


@pytest.mark.slow
def test_humaneval_solutions_pass_and_broken_ones_fail(grader: Grader, humaneval: list[dict[str, str]]) -> None:
    """All 164: as a completion, as a fenced function, and with the body replaced by one that returns nothing."""
    assert len(humaneval) == 164

    def check(record: dict[str, str]) -> list[str]:
        stub, solution = record["prompt"], record["answer"]
        results = {
            "completion": (solution, 1.0),
            "fenced": (f"Here it is:\n```python\n{stub}{solution}\n```\nDone.", 1.0),
            "broken": ("    return None\n", 0.0),
        }
        wrong = []
        for name, (response, value) in results.items():
            got = grader.grade(GradeItem(prompt="", response=response, record=record))
            if (got.value, got.error) != (value, None):
                wrong.append(f"{record['id']} {name}: {got}")
        return wrong

    with ThreadPoolExecutor(2) as pool:
        wrong = [text for texts in pool.map(check, humaneval) for text in texts]
    assert wrong == []
