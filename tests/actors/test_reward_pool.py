"""The reward pool with real actors: real maths grades, and graders that raise, hang and die."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.reward_pool import RewardFailuresError, RewardWorkerStartError
from actors.rewards import Grade, GradeItem
from benchmarks.alone import PoolAlone
from config.rewards import RewardOptions, RewardTerm
from tests.params import long

pytestmark = pytest.mark.ray


class Moody:
    """Grades "n" as n; other responses are orders. A `signal` hits who grades first: before there is a `mark`."""

    def __init__(self, *_: object) -> None: ...

    def grade(self, lane: int, items: Sequence[GradeItem]) -> list[Grade]:
        return [self._one(item) for item in items]

    def _one(self, item: GradeItem) -> Grade:
        if (mark := Path(item.record.get("mark", os.devnull))) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), item.record["signal"])
        match item.response:
            case "raise":
                raise KeyError("gold")
            case "hang":
                time.sleep(3600)
            case "die":
                os._exit(9)
            case "error":
                return Grade(value=0.0, error="no answer field")
        return Grade(value=float(item.response))

    def close(self) -> None: ...


class Broken:
    def __init__(self, *_: object) -> None:
        raise ValueError("no such function: tasks:reward")

    def grade(self, lane: int, items: Sequence[GradeItem]) -> list[Grade]:
        raise AssertionError

    def close(self) -> None: ...


def item(response: str) -> GradeItem:
    return GradeItem(prompt="?", response=response, record={"answer": "42"})


def quick(**update: object) -> RewardOptions:
    terms = (RewardTerm(kind="math", timeout_s=0.1),)
    return RewardOptions(terms=terms, **update)


def test_real_grader_grades_all_and_in_any_order() -> None:
    heard: list[int] = []
    with PoolAlone(RewardOptions(workers=2)) as pool:
        pool.meanwhile = lambda: heard.append(len(heard))
        pool.begin()
        for key in range(40):
            pool.submit(key, item(f"The answer is \\boxed{{{key + 10}}}"))
            pool.poll()
        grades = pool.drain()
        assert sorted(grades) == list(range(40))
        assert [key for key, grade in grades.items() if grade.value == 1.0] == [32]
        assert not any(grade.error for grade in grades.values())
        assert pool.drain() == {}
    assert heard, "while the driver waits for grades it hears others"


def test_raising_hanging_and_dying_fail_only_their_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward_pool._GRACE_S", 1.0)
    events: list[str] = []
    with PoolAlone(quick(workers=2), grader=Moody, on_event=lambda kind, message: events.append(kind)) as pool:
        orders = ["1", "hang", "2", "3", "die", "raise", "4", "5", "6", "error", "7", "8"]
        for key, order in enumerate(orders):
            pool.submit(key, item(order))
        grades = pool.drain()
        assert sorted(grades) == list(range(len(orders)))
        for key, order in enumerate(orders):
            assert (grades[key].error is not None) == (not order.isdigit()), (order, grades[key])
            assert grades[key].value == (float(order) if order.isdigit() else 0.0)
        assert "3 reward workers were lost while grading it" in str(grades[1].error)
        assert "the last: it took longer than 2.1 s" in str(grades[1].error)
        assert "KeyError: 'gold'" in str(grades[5].error)
        assert sorted(events) == ["reward_failed"] * 4 + ["reward_worker_replaced"] * 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("workers", [2, *long(1)])
def test_a_reward_worker_that_is_killed_or_stopped_costs_no_grade(
    number: signal.Signals, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reward_pool._GRACE_S", 1.0)
    events: list[tuple[str, str]] = []
    starts: list[int] = []

    def where() -> dict[str, Any]:
        starts.append(len(events))
        return {}

    with PoolAlone(
        quick(workers=workers), grader=Moody, actor_options=where, on_event=lambda *e: events.append(e)
    ) as pool:
        pool.begin()
        for key in range(6):
            record = {"mark": str(tmp_path / "hit"), "signal": number} if key == 2 else {}
            pool.submit(key, GradeItem(prompt="?", response=str(key), record=record))
        assert pool.drain() == {key: Grade(value=float(key)) for key in range(6)}
    ((kind, message),) = events
    assert kind == "reward_worker_replaced"
    assert message.endswith("rollout 2 is graded again")
    assert len(starts) == workers + 1, "nodes that are not to be used may be others by now"


def test_where_a_function_raised_is_told_once_per_place() -> None:
    terms = (RewardTerm(kind="python", function="tests.rewards.sample_functions:deep"),)
    events: list[tuple[str, str]] = []
    with PoolAlone(RewardOptions(terms=terms), on_event=lambda *event: events.append(event)) as pool:
        for step in range(2):
            pool.begin()
            for key in range(2):
                pool.submit(key, GradeItem(prompt="?", response=f"label{step}{key}", record={}))
            assert all("KeyError" in str(grade.error) for grade in pool.drain().values())
    assert [kind for kind, _ in events].count("reward_failed") == 4
    ((_, told),) = [event for event in events if event[0] == "reward_error"]
    assert "in deep\n    return lookup(record, response)\n" in told


def test_a_reward_worker_that_is_killed_while_it_starts_is_replaced() -> None:
    events: list[str] = []
    with PoolAlone(quick(), grader=Moody, on_event=lambda kind, message: events.append(message)) as pool:
        ray.kill(pool._crews[0].workers[0].handle)
        pool.submit(0, item("5"))
        assert pool.drain() == {0: Grade(value=5.0)}
    assert len(events) == 1
    assert "died while it started" in events[0]


def test_too_many_failures_stop_with_reasons_and_a_new_step_starts_clean() -> None:
    with PoolAlone(quick(max_failures_per_step=1), grader=Moody) as pool:
        for key in range(3):
            pool.submit(key, replace(item("error"), where="" if key == 0 else f"a.jsonl, line {key}"))
        said = r"2 rollouts .* rollout 0: no answer field; rollout 1 \(a.jsonl, line 1\): no answer field"
        with pytest.raises(RewardFailuresError, match=said):
            pool.drain()
        pool.begin()
        pool.submit(7, item("3"))
        assert pool.drain() == {7: Grade(value=3.0)}


def test_failures_of_a_further_round_count_on() -> None:
    """Dynamic sampling: reward.max_failures_per_step is of the RL step, not of each of its rounds."""
    with PoolAlone(quick(max_failures_per_step=1), grader=Moody) as pool:
        pool.begin()
        pool.submit(0, item("error"))
        assert pool.drain()[0].error
        pool.begin(same_step=True)
        pool.submit(0, item("error"))
        with pytest.raises(RewardFailuresError, match="2 rollouts of this step"):
            pool.drain()


def test_a_bad_record_is_reported_once_for_the_run_and_stops_nothing() -> None:
    events: list[tuple[str, str]] = []
    with PoolAlone(quick(max_failures_per_step=0), on_event=lambda *event: events.append(event)) as pool:
        for _ in range(2):
            pool.begin()
            for key in range(4):
                pool.submit(
                    key,
                    GradeItem(
                        prompt="?", response=r"\boxed{7}", record={"answer": "?"}, where=f"a.jsonl, line {key // 2}"
                    ),
                )
            assert all(grade.bad_record for grade in pool.drain().values())
    assert [kind for kind, _ in events] == ["bad_record"] * 2
    assert "a.jsonl, line 1: record['answer'], the gold answer, cannot be read" in events[1][1]


def test_grader_that_cannot_be_built_is_an_error_with_its_reason() -> None:
    with PoolAlone(quick(), grader=Broken) as pool:
        pool.submit(0, item("1"))
        with pytest.raises(RewardWorkerStartError, match="no such function: tasks:reward"):
            pool.drain()


def test_the_gradings_of_a_step_are_few_spans() -> None:
    """How many depends on who was fast; that a worker's are in order and joined does not."""
    spans: list[tuple[str, str, float, float]] = []
    begin_s = time.time()
    with PoolAlone(quick(workers=2), grader=Moody, on_span=lambda *span: spans.append(span)) as pool:
        for step in (1, 2):
            pool.begin()
            for key in range(30):
                pool.submit(key, item("1"))
            pool.drain()
            assert step <= len(spans) < 15 * step
        before = len(spans)
        pool.begin()
        pool.submit(0, item("die"))
        pool.drain()
        assert len(spans) == before + 3  # lost gradings are on the timeline too
    pool.close()  # twice is fine
    assert all(kind == "grade" and begin_s <= start <= end <= time.time() for _, kind, start, end in spans)
    by_worker = [[s for s in spans if s[0] == name] for name in ("reward-0", "reward-1")]
    assert all(a[3] <= b[2] for mine in by_worker for a, b in pairwise(mine))


def test_gradings_far_apart_are_two_spans() -> None:
    spans: list[tuple[float, float]] = []
    with PoolAlone(quick(), grader=Moody, on_span=lambda _w, _k, start, end: spans.append((start, end))) as pool:
        pool.begin()
        for key in range(2):
            pool.submit(key, item("1"))
            while pool._crews[0].workers[0].sent or pool._crews[0].pending:
                pool.poll()
            time.sleep(0.5)
        pool.drain()
    assert len(spans) == 2
