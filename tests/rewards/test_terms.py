"""Format and python terms, the weighted sum, and what failures look like."""

from pathlib import Path

import numpy as np
import pytest

from actors.rewards import Grade, GradeItem, RewardConfigError, build
from config.rewards import RewardOptions, RewardTerm

FUNCTIONS = "tests.rewards.sample_functions"


def grade(*terms: RewardTerm, response: str = "", record: dict[str, object] | None = None) -> Grade:
    grader = build(RewardOptions(terms=terms))
    try:
        return grader.grade(GradeItem(prompt="a prompt", response=response, record=record or {}))
    finally:
        grader.close()


def python(function: str, called: str | None = None, **more: object) -> RewardTerm:
    return RewardTerm(kind="python", function=f"{FUNCTIONS}:{function}", name=called, **more)


def test_format() -> None:
    term = RewardTerm(kind="format", pattern=r"<think>.*</think>")
    assert grade(term, response="<think>a\nb</think> 7").parts == {"format": 1.0}
    assert grade(term, response="<think>a").parts == {"format": 0.0}


def test_python_gets_prompt_response_and_record() -> None:
    got = grade(python("length"), response="abcd", record={"target": 8})
    assert (got.value, got.error) == (0.5, None)
    assert grade(python("prints")).value == 0.5


@pytest.mark.parametrize("name", ["takes_record_as_reference", "takes_record_as_target"])
def test_a_third_parameter_that_is_annotated_or_optional_is_the_record(name: str) -> None:
    assert grade(python(name), response="7", record={"answer": "7"}).value == 1.0


def test_the_sum_is_weighted_and_its_parts_are_not() -> None:
    got = grade(
        RewardTerm(kind="math"),
        RewardTerm(kind="format", pattern="so", weight=0.25),
        RewardTerm(kind="format", pattern="thus", weight=10, name="thus"),
        python("length", weight=-0.5),
        response=r"so \boxed{7}",
        record={"answer": "7", "target": 24},
    )
    assert got.parts == {"math": 1.0, "format": 1.0, "thus": 0.0, "python": 0.5}
    assert got.value == 1.0 + 0.25 - 0.25
    assert got.error is None


@pytest.mark.parametrize(
    ("name", "response", "words"),
    [
        ("raises", "", "python: RuntimeError: the judge is out of office (tests/rewards/sample_functions.py:23)"),
        ("length", "", "python: KeyError: 'target' (tests/rewards/sample_functions.py:"),
        ("exits", "exit", "child process died (exit status 3)"),
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


def test_the_frames_of_a_function_that_raises_are_kept() -> None:
    got = grade(python("deep"), response="label")
    assert got.error is not None
    assert got.error.startswith("python: KeyError: 'label' (tests/rewards/sample_functions.py:")
    assert got.trace is not None
    told = [line.strip() for line in got.trace.splitlines() if not set(line) <= set(" ^~")]
    assert [line.rpartition(", ")[2] for line in told[::2]] == ["in deep", "in lookup", "KeyError: 'label'"]
    assert told[1::2] == ["return lookup(record, response)", "return float(record[key])"]
    assert "sample_functions.py" in told[0]


def test_a_function_gets_the_tokens_and_the_finish_reason_if_it_asks_for_them() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    for name, reason, value in (
        ("takes_tokens", "length", 3),
        ("takes_tokens", "stop", -24),
        ("takes_anything", "", 0),
    ):
        with build(RewardOptions(terms=(python(name),))) as grader:
            item = GradeItem(prompt="", response="", record={}, finish_reason=reason, tokens=tokens)
            assert grader.grade(item) == Grade(value=value, parts={"python": value})


def test_a_child_that_was_killed_is_asked_once_more(tmp_path: Path) -> None:
    got = grade(python("dies_once"), record={"mark": str(tmp_path / "mark")})
    assert (got.value, got.error) == (1.0, None)


def test_terms_have_the_names_they_are_given() -> None:
    got = grade(python("prints", called="short"), python("returns", called="sure"), response="bool")
    assert got.parts == {"short": 0.5, "sure": 1.0}
    got = grade(python("prints", called="short"), python("raises", called="judge"))
    assert str(got.error).startswith("judge: RuntimeError")
    with pytest.raises(RewardConfigError, match=r"reward.terms\[1\].name: two terms are called 'python'"):
        grade(python("prints"), python("returns"))


@pytest.mark.parametrize(("response", "value"), [("bool", 1.0), ("int", 3.0)])
def test_numbers_of_any_kind(response: str, value: float) -> None:
    assert grade(python("returns"), response=response).value == value


def test_a_function_that_hangs_or_dies_is_replaced() -> None:
    grader = build(RewardOptions(terms=(python("hangs", timeout_s=0.5),)))
    try:
        first, second = (grader.grade(GradeItem(prompt="", response=text, record={})) for text in ("hang", "go on"))
    finally:
        grader.close()
    assert first.error == f"python: {FUNCTIONS}:hangs took more than 0.5 s and was killed"
    assert (second.value, second.error) == (1.0, None)
    grader = build(RewardOptions(terms=(python("exits"),)))
    try:
        first, second = (grader.grade(GradeItem(prompt="", response=text, record={})) for text in ("exit", "go on"))
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
        (
            RewardTerm(kind="python", function=f"{FUNCTIONS}:normalized"),
            "attribute 'normalized'; did you mean normalised?",
        ),
        (
            RewardTerm(kind="python", function="struct.py:pack"),
            "a module goes without its ending: write struct:NAME",
        ),
        (RewardTerm(kind="python", function=f"{FUNCTIONS}:not_callable"), "is not callable"),
        (RewardTerm(kind="python", function="os:system"), "is called as system(prompt, response, record)"),
        (python("wants_completions"), "wants_completions(completions: list[str], **more: Any) -> float is called as"),
        (python("wants_label"), "'label' is not on offer; a field of the data file is record[\"label\"]"),
        (python("trl"), "'prompts', 'completions', 'answer' is not on offer; did you mean prompt?"),
        (
            python("takes_answer"),
            'the third is the record, a line of the data file: name it record, and read record["an',
        ),
        (python("verl"), "'data_source', 'solution_str', 'ground_truth' is not on offer; did you mean record?"),
        (python("by_name", arguments={"steps": 3}), "got an unexpected keyword argument 'steps'"),
        (python("Silent"), "Silent is a class without score(...) or __call__(...)"),
        (
            python("Model", arguments={"size": 3}),
            "Model(bias: float = 0.0) is made as Model(size=3)",
        ),
        (python("Model", arguments={"bias": -1.0}), 'in __init__\n    raise ValueError("no such model")'),
    ],
)
def test_terms_that_cannot_work_name_their_key(term: RewardTerm, words: str) -> None:
    with pytest.raises(RewardConfigError) as caught:
        build(RewardOptions(terms=(term,)))
    assert words in str(caught.value)
    assert str(caught.value).startswith("reward.terms[0]")
