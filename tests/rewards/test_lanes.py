"""Functions that ask for names, groups and batches, are awaited or are classes: what they get, and with whom."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, build
from actors.rewards.assembly import Assembly, RewardCall
from actors.rewards.calling import Traits
from actors.rewards.check import check_reward
from actors.rewards.lanes import lanes_of
from config.rewards import RewardOptions, RewardTerm

FUNCTIONS = "tests.rewards.sample_functions"


def python(function: str, **more: Any) -> RewardTerm:
    return RewardTerm(kind="python", function=f"{FUNCTIONS}:{function}", name=function, **more)


def items(*responses: str, step: int = 0) -> list[GradeItem]:
    """One token per letter."""
    return [
        GradeItem(
            prompt="ask",
            response=text,
            record={},
            finish_reason="stop",
            tokens=np.arange(len(text), dtype=np.int32),
            sample=sample,
            step=step,
        )
        for sample, text in enumerate(responses)
    ]


def graded(term: RewardTerm, *responses: str, step: int = 0) -> list[Grade]:
    with build(RewardOptions(terms=(term,))) as grader:
        return grader.grade_group(items(*responses, step=step))


def values(term: RewardTerm, *responses: str) -> list[float]:
    return [grade.value for grade in graded(term, *responses)]


def test_a_function_is_given_what_it_names_in_any_order() -> None:
    assert [grade.value for grade in graded(python("by_name"), "a", "bcd", step=7)] == [701.0, 713.0]
    assert [grade.value for grade in graded(python("with_names_of_their_own"), "four", step=7)] == [3 + 4 + 7]


def test_a_function_that_asks_for_its_group_gets_all_of_it_at_every_call() -> None:
    assert values(python("rank"), "ab", "abcd", "a", "abc") == [1.0, 3.0, 0.0, 2.0]
    assert values(python("normalised", batch_size=1), "a", "abc", "ab") == [-1.0, 1.0, 0.0]


def test_one_of_a_group_that_raises_or_hangs_costs_no_other_its_grade() -> None:
    got = graded(python("unique", timeout_s=0.3), "same", "hang", "same", "raise", "own")
    assert [grade.value for grade in got] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [grade.error is None for grade in got] == [True, False, True, False, True]
    assert got[1].error == f"unique: {FUNCTIONS}:unique took more than 0.3 s and was killed"
    assert str(got[3].error).startswith("unique: LookupError: nothing to compare with (tests/rewards/sample_functions")
    assert 'raise LookupError("nothing to compare with")' in str(got[3].trace)


def test_a_batch_is_one_call_with_lists() -> None:
    assert values(python("together", batch_size=3), *"abcdefgh") == [3.0] * 6 + [2.0] * 2
    got = graded(python("together", batch_size=2), "raise", "b", "c", "short", "e")
    assert [grade.value for grade in got] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert all("RuntimeError: the batch is bad" in str(grade.error) for grade in got[:2])
    assert all("together returned 1 numbers for 2 responses" in str(grade.error) for grade in got[2:4])


def test_calls_that_are_awaited_are_under_way_at_once_up_to_the_limit() -> None:
    assert max(values(python("asynchronous", concurrency=3), *"abcdefgh")) == 3.0


def test_an_awaited_call_that_raises_or_is_late_fails_alone_and_is_told_from_one_whose_own_wait_ended() -> None:
    got = graded(python("asynchronous", timeout_s=0.3), "raise", "late", "impatient", "fine")
    assert [grade.error is None for grade in got] == [False, False, False, True]
    assert got[0].trace is not None
    assert got[0].trace.splitlines()[1].strip() == 'raise RuntimeError("nobody answers")'
    assert got[1].error == f"asynchronous: {FUNCTIONS}:asynchronous took more than 0.3 s"
    assert str(got[2].error).startswith("asynchronous: TimeoutError")
    assert "sample_functions.py" in str(got[2].trace).splitlines()[0]


def test_a_class_is_made_once_and_its_method_is_called() -> None:
    with build(RewardOptions(terms=(python("Model", batch_size=2, arguments={"bias": 0.5}),))) as grader:
        assert [g.value for g in grader.grade_group(items("a", "bc", "def"))] == [1.5, 2.5, 3.5]
        assert [g.value for g in grader.grade_group(items("abcd"))] == [4.5]
    assert values(python("Called"), "ab", "abc") == [2.0, 3.0]


def test_parts_and_errors_of_all_lanes_are_one_grade() -> None:
    terms = (python("rank", weight=2.0), python("by_name"), python("unique", weight=0.5, timeout_s=0.5))
    with build(RewardOptions(terms=terms)) as grader:
        first, second, third = grader.grade_group(items("ab", "a", "raise"))
    assert (first.parts, first.value) == ({"rank": 1.0, "by_name": 2.0, "unique": 1.0}, 4.5)
    assert list(first.parts) == ["rank", "by_name", "unique"]
    assert second.value == 2 * 0 + 11 + 0.5
    assert (third.value, third.parts) == (0.0, {"rank": 2.0, "by_name": 25.0})
    assert str(third.error).startswith("unique: LookupError")


LANES = [
    (RewardTerm(kind="python", function="m:f", name="one"), Traits((), False, False)),
    (RewardTerm(kind="python", function="m:f", name="all", weight=3.0), Traits(("group",), False, False)),
    (RewardTerm(kind="python", function="m:f", name="batch", batch_size=4), Traits(("tokens",), False, False)),
    (RewardTerm(kind="python", function="m:f", name="wait", concurrency=2), Traits((), True, False)),
]


def answers(assembly: Assembly, calls: Sequence[RewardCall]) -> list[tuple[int, Grade]]:
    """Each call's grade of a response depends on all that it was called with."""
    done = []
    for call in calls:
        name = LANES[call.lane][0].label
        value = float(sum(3 ** (k % 7) for k in call.keys))
        done += assembly.answered(call, [Grade(value=0.0, parts={name: value + key}) for key in call.keys])
    return done


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 40), st.data())
def test_who_is_called_with_whom_does_not_depend_on_who_came_first(
    counts: list[int], first: int, data: st.DataObject
) -> None:
    """Against what everyone together makes of it, whatever is missing in the end."""
    groups, end = [], first
    for count in counts:
        groups.append(range(end, end + count))
        end += count
    keys = [key for group in groups for key in group]
    there = data.draw(st.sets(st.sampled_from(keys)))
    terms, traits = [term for term, _ in LANES], {index: read for index, (_, read) in enumerate(LANES)}
    lanes = lanes_of(RewardOptions(terms=tuple(terms)), traits)
    assert [lane.size for lane in lanes] == [1, None, 4, 1]

    def round_of(order: Sequence[int]) -> dict[int, Grade]:
        assembly = Assembly(terms, lanes)
        assembly.begin(groups)
        calls = [call for key in order for call in assembly.submit(key, items("r")[0])]
        for call in calls:  # nobody waits for more than it is called with
            assert lanes[call.lane].size != 1 or len(call.keys) == 1
            assert all(list(call.keys) == sorted(call.keys) for call in calls)
        assert all(item.tokens is None for call in calls if call.lane in (0, 3) for item in call.items)
        ends = assembly.flush()
        assert assembly.flush() == []
        mixed = data.draw(st.permutations([*calls, *ends]))
        return dict(answers(assembly, mixed))

    expected = round_of(sorted(there))
    assert round_of(data.draw(st.permutations(sorted(there)))) == expected
    assert expected.keys() == there
    for group in groups:
        whole = float(sum(3 ** (k % 7) for k in group if k in there))
        assert all(expected[key].parts["all"] == whole + key for key in group if key in there)


def test_what_cannot_work_is_said_before_a_run() -> None:
    def said(term: RewardTerm, *, early_ends: bool = False) -> list[tuple[str, str]]:
        return check_reward(RewardOptions(terms=(RewardTerm(kind="math"), term)), early_ends=early_ends)

    assert said(python("rank")) == said(python("by_name"), early_ends=True) == []
    ((key, words),) = said(python("rank", prefix_sufficient=True), early_ends=True)
    assert (key, "asks for group, which rollout.abort changes" in words) == ("terms.1.function", True)
    ((key, _),) = said(python("takes_tokens"), early_ends=True)
    assert key == "terms.1.function"
    ((key, words),) = said(python("normalised", batch_size=8))
    assert (key, "so its lists are one prompt's; set it to 1" in words) == ("terms.1.batch_size", True)
    ((key, words),) = said(python("rank", concurrency=2))
    assert (key, "is not async" in words) == ("terms.1.concurrency", True)
    assert said(python("asynchronous", concurrency=2)) == []
    ((key, words),) = said(python("no_such_function"))
    assert (key, words.partition(" cannot be used: ")[0]) == ("terms.1.function", f"'{FUNCTIONS}:no_such_function'")


@pytest.mark.parametrize(
    ("term", "hosted", "in_flight"),
    [
        (python("rank"), False, 1),
        (python("rank", gpus=1), True, 1),
        (python("asynchronous", concurrency=5), True, 5),
        (python("Model"), True, 1),
        (python("Called", concurrency=3), True, 3),
        (RewardTerm(kind="judge", url="http://x", model="m", template="{response}", concurrency=7), True, 7),
    ],
)
def test_who_has_an_actor_of_its_own(term: RewardTerm, hosted: bool, in_flight: int) -> None:
    (lane,) = lanes_of(RewardOptions(terms=(term,)))
    assert (lane.hosted, lane.in_flight) == (hosted, in_flight)
