"""The process that computes rewards, beside what a user's function may do to it."""

from pathlib import Path

import pytest

from actors import identity
from actors.identity import PRINTS_BYTES
from actors.rewards import Grade, GradeItem, build
from config.rewards import RewardOptions, RewardTerm

FUNCTIONS = "tests.rewards.sample_functions"


def grades(function: str, *responses: str, mark: Path | None = None, **more: object) -> list[Grade]:
    term = RewardTerm(kind="python", function=f"{FUNCTIONS}:{function}", **more)
    with build(RewardOptions(terms=(term,))) as grader:
        record = {"mark": str(mark)}
        return [grader.grade(GradeItem(prompt="", response=text, record=record)) for text in responses]


def test_a_function_that_returns_twice_shifts_no_reward() -> None:
    assert [(grade.value, grade.error) for grade in grades("forks", *"123456")] == [(float(n), None) for n in "123456"]


def test_an_answer_to_another_question_ends_the_child_which_is_asked_once_more(tmp_path: Path) -> None:
    got = grades("answers_by_itself", *"1234", mark=tmp_path / "mark")
    assert [(grade.value, grade.error) for grade in got] == [(1.0, None), (2.0, None), (3.0, None), (4.0, None)]


def test_no_program_that_a_function_starts_reads_the_requests() -> None:
    got = grades("asks_a_tool", *"123", timeout_s=20)
    assert [(grade.value, grade.error) for grade in got] == [(1.0, None), (2.0, None), (3.0, None)]


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("base", "python: Unheard: not an Exception (tests/rewards/sample_functions.py:"),
        ("cancelled", "python: CancelledError: by hand (tests/rewards/sample_functions.py:"),
        ("descriptors", "child process died (it closed the descriptor of its answers)"),
        ("segfault", "child process died (killed by SIGSEGV)"),
    ],
)
def test_an_end_is_told_as_it_was(response: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rewards.child._END_TIMEOUT_S", 0.5)  # of the one that never ends
    assert says in str(grades("ends_by", response)[0].error)


def test_what_a_call_prints_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "reward.log"
    with log.open("a", encoding="utf-8") as file:
        monkeypatch.setattr(identity, "_file", file)
        assert [grade.value for grade in grades("floods", *"123")] == [1.0, 2.0, 3.0]
    text = log.read_text(encoding="utf-8")
    left_out = 20 * 100_000 + len("the last words\n") - PRINTS_BYTES
    assert text.count(f"... {left_out} bytes left out") == 3
    assert len(text) < 3 * (PRINTS_BYTES + 100)
