"""Format and python terms, the weighted sum, and what failures look like."""

import pytest

from actors.rewards import GradeItem, RewardConfigError, build
from actors.rewards.options import RewardOptions, RewardTerm

FUNCTIONS = "tests.rewards.sample_functions"


def grade(*terms: RewardTerm, response: str = "", record: dict[str, object] | None = None):
    grader = build(RewardOptions(terms=terms))
    try:
        return grader.grade(GradeItem("a prompt", response, record or {}))
    finally:
        grader.close()


def python(name: str, **more: object) -> RewardTerm:
    return RewardTerm(kind="python", function=f"{FUNCTIONS}:{name}", **more)


def test_format() -> None:
    term = RewardTerm(kind="format", pattern=r"<think>.*</think>")
    assert grade(term, response="<think>a\nb</think> 7").parts == {"format": 1.0}
    assert grade(term, response="<think>a").parts == {"format": 0.0}


def test_python_gets_prompt_response_and_record() -> None:
    got = grade(python("length"), response="abcd", record={"target": 8})
    assert (got.value, got.error) == (0.5, None)
    assert grade(python("prints")).value == 0.5


def test_the_sum_is_weighted_and_its_parts_are_not() -> None:
    got = grade(
        RewardTerm(kind="math"),
        RewardTerm(kind="format", pattern="so", weight=0.25),
        RewardTerm(kind="format", pattern="thus", weight=10),
        python("length", weight=-0.5),
        response=r"so \boxed{7}",
        record={"answer": "7", "target": 24},
    )
    assert got.parts == {"math": 1.0, "format": 1.0, "format#2": 0.0, "python": 0.5}
    assert got.value == 1.0 + 0.25 - 0.25
    assert got.error is None


@pytest.mark.parametrize(
    ("name", "response", "words"),
    [
        ("raises", "", "python: RuntimeError: the judge is out of office"),
        ("length", "", "python: KeyError: 'target'"),
        ("exits", "exit", "child process died (exit status"),
        ("returns", "nan", "returned nan, not a finite number"),
        ("returns", "inf", "returned inf, not a finite number"),
        ("returns", "text", "returned '1.0', not a finite number"),
        ("returns", "none", "returned None, not a finite number"),
    ],
)
def test_a_function_that_fails_is_an_error_of_that_rollout(name: str, response: str, words: str) -> None:
    got = grade(python(name), response=response)
    assert got.value == 0.0
    assert got.error is not None
    assert words in got.error


@pytest.mark.parametrize(("response", "value"), [("bool", 1.0), ("int", 3.0)])
def test_numbers_of_any_kind(response: str, value: float) -> None:
    assert grade(python("returns"), response=response).value == value


def test_a_function_that_hangs_or_dies_is_replaced() -> None:
    grader = build(RewardOptions(terms=(python("hangs", timeout_s=0.5),)))
    try:
        first, second = (grader.grade(GradeItem("", text, {})) for text in ("hang", "go on"))
    finally:
        grader.close()
    assert first.error == f"python: {FUNCTIONS}:hangs took more than 0.5 s and was killed"
    assert (second.value, second.error) == (1.0, None)
    grader = build(RewardOptions(terms=(python("exits"),)))
    try:
        first, second = (grader.grade(GradeItem("", text, {})) for text in ("exit", "go on"))
    finally:
        grader.close()
    assert first.error is not None
    assert (second.value, second.error) == (1.0, None)


def test_a_pattern_that_never_ends_is_an_error() -> None:
    got = grade(RewardTerm(kind="format", pattern="(a+)+b", timeout_s=0.5), response="a" * 60)
    assert got.error == "format: the pattern took more than 0.5 s; make it simpler"


def test_parts_graded_before_the_failure_are_kept() -> None:
    got = grade(RewardTerm(kind="format", pattern="x"), python("raises"), response="x")
    assert (got.value, got.parts) == (0.0, {"format": 1.0})
    assert got.error is not None


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (RewardTerm(kind="format"), "reward.terms[0].pattern is missing"),
        (RewardTerm(kind="format", pattern="("), "reward.terms[0].pattern is not a regular expression"),
        (RewardTerm(kind="python"), "reward.terms[0].function must look like 'package.module:function', not None"),
        (RewardTerm(kind="python", function="no_colon"), "reward.terms[0].function must look like"),
        (RewardTerm(kind="python", function="no_such_module:f"), "No module named 'no_such_module'"),
        (RewardTerm(kind="python", function=f"{FUNCTIONS}:missing"), "has no attribute 'missing'"),
        (RewardTerm(kind="python", function=f"{FUNCTIONS}:not_callable"), "is not callable"),
    ],
)
def test_terms_that_cannot_work_name_their_key(term: RewardTerm, words: str) -> None:
    with pytest.raises(RewardConfigError) as caught:
        build(RewardOptions(terms=(term,)))
    assert words in str(caught.value)
    assert str(caught.value).startswith("reward.terms[0]")
