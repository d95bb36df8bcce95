"""Length statistics know how responses of a problem end, whatever cuts some of them off, and outlive their process."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation import length_statistics
from policies.speculation.length_statistics import LengthClass, LengthStatistics, problem_key

QUANTILES = np.array([[0.1], [0.5], [0.9]])
UNKNOWN = LengthClass.UNKNOWN


def enter(statistics: LengthStatistics, key: int, lengths: list[int]) -> None:
    initial = statistics.class_of(key)
    for tokens in lengths:
        statistics.add(key, initial, tokens, ended=True)
    statistics.settle()


def taught(rounds: int = 30) -> LengthStatistics:
    """Problems 0, 1, 2 are short, medium and long, problem 3 is anything."""
    statistics, rng = LengthStatistics(), np.random.default_rng(0)
    for _ in range(rounds):
        for key, middle in enumerate((50, 300, 2000)):
            initial = statistics.class_of(key)
            for tokens in (middle * np.exp(0.3 * rng.standard_normal(8))).astype(int):
                statistics.add(key, initial, int(tokens), ended=True)
        statistics.settle()
    return statistics


def left(statistics: LengthStatistics, initial: LengthClass, drawn: int, room: int = 1 << 20) -> list[float]:
    found = statistics.remaining(np.array([initial]), np.array([drawn]), np.array([room]), QUANTILES)
    return [float(value) for value in found[:, 0]]


def test_a_problem_has_the_class_that_most_of_its_rollouts_fell_into() -> None:
    statistics = taught()
    assert [statistics.class_of(key) for key in range(4)] == [0, 1, 2, UNKNOWN]
    for _ in range(4):  # it has become longer
        enter(statistics, 0, [2000] * 8)
    assert statistics.class_of(0) == LengthClass.LONG


def test_what_is_left_follows_the_initial_class_and_then_what_the_response_has() -> None:
    statistics = taught()
    for initial, middle in ((LengthClass.SHORT, 50), (LengthClass.MEDIUM, 300), (LengthClass.LONG, 2000)):
        low, half, high = left(statistics, initial, 0)
        assert low < half < high
        assert middle * 0.75 < half < middle * 1.35
    # A "short" response of a thousand tokens is none: what is left is that of others so long.
    assert left(statistics, LengthClass.SHORT, 1000)[1] > 300
    assert left(statistics, LengthClass.LONG, 1000)[1] > 5 * left(statistics, LengthClass.SHORT, 40)[1]


@given(
    drawn=st.integers(0, 1 << 19),
    room=st.integers(0, 1 << 19),
    initial=st.sampled_from(list(LengthClass)),
    ends=st.lists(st.integers(1, 1 << 18), min_size=1, max_size=20),
)
def test_what_is_left_lies_between_one_token_and_the_room_and_grows_with_the_quantile(
    drawn: int, room: int, initial: LengthClass, ends: list[int]
) -> None:
    statistics = LengthStatistics()
    enter(statistics, 7, ends)
    found = left(statistics, initial, drawn, room)
    assert found == sorted(found)
    assert all(1 <= tokens <= max(room, 1) for tokens in found)


def test_responses_that_were_cut_off_do_not_look_short() -> None:
    """Half are aborted at 100 tokens, half go on to about 1,000: nobody ended at 100."""
    statistics, rng = LengthStatistics(), np.random.default_rng(1)
    for number in range(2000):
        if number % 2:
            statistics.add(number % 50, UNKNOWN, 100, finished=False, ended=False)
        else:
            statistics.add(number % 50, UNKNOWN, int(1000 * np.exp(0.2 * rng.standard_normal())), ended=True)
    statistics.settle()
    low, half, _ = left(statistics, UNKNOWN, 0)
    assert low > 600
    assert 850 < half < 1200


def test_a_preempted_response_counts_once() -> None:
    """In two parts, the second from where the first ended, it is what it is in one."""
    whole, parts = LengthStatistics(), LengthStatistics()
    for tokens in (90, 400, 777, 1200):
        whole.add(1, UNKNOWN, tokens, ended=True)
        parts.add(1, UNKNOWN, 64, finished=False, ended=False)
        parts.add(1, UNKNOWN, tokens, entered=64, ended=True)
    whole.settle()
    parts.settle()
    np.testing.assert_allclose(parts._reached, whole._reached, rtol=1e-3)
    np.testing.assert_allclose(parts._ended, whole._ended, rtol=1e-3)
    assert parts.class_of(1) == whole.class_of(1)


def test_nothing_counts_before_the_next_weights_so_that_early_ends_do_not_make_a_problem_short() -> None:
    statistics = taught()
    for _ in range(16):
        statistics.add(2, LengthClass.LONG, 20, ended=True)
    assert statistics.class_of(2) == LengthClass.LONG
    statistics.settle()
    assert statistics.class_of(2) == LengthClass.SHORT


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_statistics, "_PROBLEMS", 100)
    monkeypatch.setattr(length_statistics, "_WAITING", 64)
    statistics = LengthStatistics()
    for key in range(1000):
        statistics.add(key, UNKNOWN, 10 + key, ended=True)
        assert len(statistics._waiting) < 64
        assert len(statistics) <= 100 + 64
    statistics.settle()
    assert len(statistics) == 100
    assert statistics.class_of(999) != UNKNOWN
    assert statistics.class_of(0) == UNKNOWN


def test_statistics_outlive_the_process(tmp_path: Path) -> None:
    statistics, other = taught(), LengthStatistics()
    statistics.save(str(tmp_path))
    other.load(str(tmp_path))
    assert [other.class_of(key) for key in range(4)] == [statistics.class_of(key) for key in range(4)]
    for initial in LengthClass:
        np.testing.assert_allclose(left(other, initial, 30), left(statistics, initial, 30), rtol=1e-3)


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "another format": lambda text: json.dumps(json.loads(text) | {"format": 99}),
    "another shape": lambda text: json.dumps(json.loads(text) | {"reached": [[1.0]]}),
    "not numbers": lambda text: json.dumps(json.loads(text) | {"ended": None}),
    "infinite": lambda text: text.replace('"ended":[[0.0', '"ended":[[Infinity'),
    "a bin too far": lambda text: json.dumps(json.loads(text) | {"problems": [[1, 10**9]]}),
    "a list": lambda text: "[]",
    "problems of words": lambda text: json.dumps(json.loads(text) | {"problems": [["a", "b"]]}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_warning_and_changes_nothing(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    statistics = taught()
    statistics.save(str(tmp_path))
    before = [left(statistics, initial, 30) for initial in LengthClass]
    path = tmp_path / "lengths.json"
    path.write_text(DAMAGE[damage](path.read_text()))
    with caplog.at_level(logging.WARNING):
        statistics.load(str(tmp_path))
    assert "lengths.json" in caplog.text
    assert [left(statistics, initial, 30) for initial in LengthClass] == before


def test_a_missing_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statistics = LengthStatistics()
    with caplog.at_level(logging.WARNING):
        statistics.load(str(tmp_path))
    assert "begin without them" in caplog.text
    assert not statistics.known


def test_a_problem_is_known_by_its_prompt() -> None:
    prompt = np.array([3, 4, 5], np.int32)
    assert problem_key(prompt) == problem_key(prompt.copy()) != problem_key(prompt[:2])
