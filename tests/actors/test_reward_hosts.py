"""Terms with an actor of their own, groups and batches in the pool: real actors, some of which are killed."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.reward_pool import RewardWorkerStartError
from actors.rewards import Grade, GradeItem, build
from benchmarks.alone import PoolAlone
from config.rewards import RewardOptions
from launch.run_folder import log_file
from tests.rewards.stand_in import endpoint, term_of

pytestmark = pytest.mark.ray
FUNCTIONS = "tests.rewards.sample_functions"


def options(*terms: dict[str, Any], **more: Any) -> RewardOptions:
    return RewardOptions.model_validate({"terms": terms, **more})


def python(function: str, **more: Any) -> dict[str, Any]:
    return {"kind": "python", "function": f"{FUNCTIONS}:{function}", "name": function, **more}


def item(sample: int, record: dict[str, Any] | None = None) -> GradeItem:
    tokens = np.arange(sample % 5 + 1, dtype=np.int32)
    return GradeItem(prompt="?", response="r" * (sample % 5 + 1), record=record or {}, tokens=tokens, sample=sample)


def until(pool: PoolAlone, there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        pool.poll()
        time.sleep(0.01)


def test_grades_of_groups_batches_and_awaited_calls_are_those_of_one_process_whatever_the_workers() -> None:
    terms = (python("rank"), python("together", batch_size=4), python("Model", batch_size=3), python("Called"))
    groups = [range(7), range(7, 9), range(9, 14)]
    order = [(5 * key) % 14 for key in range(14)]
    samples = {key: item(key - group.start) for group in groups for key in group}
    with build(options(*terms)) as grader:
        grader.begin(groups)
        for key in samples:
            grader.submit(key, samples[key])
        expected = grader.drain()
    for workers in (1, 3):
        with PoolAlone(options(*terms, workers=workers)) as pool:
            pool.begin(groups)
            for key in order:
                pool.submit(key, samples[key])
                pool.poll()
            assert pool.drain() == expected
    assert expected[8].parts == {"rank": 1.0, "together": 4.0, "Model": 2.0, "Called": 2.0}


def test_a_slow_judge_keeps_nobody_who_samples_waiting_and_has_many_requests_at_once() -> None:
    """Not one reply comes before all is sampled, as many are asked as may be, and other grades come in meanwhile."""
    with endpoint(full=None) as there:
        terms = (python("prints"), term_of(there.url, concurrency=8))
        with PoolAlone(options(*terms)) as pool:
            pool.begin([range(20)])
            until(pool, lambda: "" not in pool.nodes)
            for key in range(20):
                pool.submit(key, item(key))  # returns, and so does
                pool.poll()
            until(pool, lambda: there.at_once == 8)
            until(pool, lambda: not pool._crews[0].pending and not pool._crews[0].workers[0].sent)
            assert len(pool._assembly._graded) == 20  # by the function, which has not waited for the judge
            assert len(there.requests) == 8
            there.open.set()
            grades = pool.drain()
    assert there.most == 8
    assert [grades[key].parts["judge"] for key in range(20)] == [key % 5 + 1 for key in range(20)]


def test_who_kills_an_actor_is_found_among_those_that_were_there() -> None:
    """It is lost twice with all that it has, and then each call is alone with it: no other fails."""
    events: list[tuple[str, str]] = []
    with PoolAlone(options(python("deadly", concurrency=4)), on_event=lambda *event: events.append(event)) as pool:
        pool.begin([range(4)])
        for key, response in enumerate(("a", "die", "b", "c")):
            pool.submit(key, GradeItem(prompt="?", response=response, record={}))
        grades = pool.drain()
    assert [grades[key].value for key in range(4)] == [1.0, 0.0, 1.0, 1.0]
    assert [key for key, grade in grades.items() if grade.error] == [1]
    assert "3 reward workers were lost while grading it" in str(grades[1].error)
    replaced = [message for kind, message in events if kind == "reward_worker_replaced"]
    assert len(replaced) == 3
    assert replaced[0].startswith("the actor of the reward term deadly: ")
    assert replaced[0].endswith(" is graded again")  # what it had by then: on a busy machine not all four calls


def test_a_killed_reward_worker_costs_no_grade_of_a_group(tmp_path: Path) -> None:
    """Nor does a child that is killed in the middle of a call."""
    record = {"mark": str(tmp_path / "mark")}
    with PoolAlone(options(python("rank"), python("dies_once"))) as pool:
        pool.begin([range(3)])
        for key in range(3):
            pool.submit(key, item(key, record))
        ray.kill(pool._crews[0].workers[0].handle)
        assert pool.drain() == {
            key: Grade(value=key + 1.0, parts={"rank": float(key), "dies_once": 1.0}) for key in range(3)
        }


def test_what_is_raised_and_printed_in_an_actor_is_told_and_kept(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    terms = (python("asynchronous"), python("Model", batch_size=2))
    with PoolAlone(options(*terms), log=partial(log_file, tmp_path), on_event=lambda *e: events.append(e)) as pool:
        pool.begin([range(3)])
        for key, response in enumerate(("raise", "raise", "fine")):
            pool.submit(key, GradeItem(prompt="?", response=response, record={}))
        grades = pool.drain()
    assert [grades[key].error is None for key in range(3)] == [False, False, True]
    (told,) = [message for kind, message in events if kind == "reward_error"]
    assert 'in asynchronous\n    raise RuntimeError("nobody answers")\n' in told
    assert "actors/rewards" not in told
    assert "scores 2" in (tmp_path / "logs" / "reward-Model.log").read_text()


def test_a_class_that_cannot_be_made_stops_the_start_with_the_authors_line() -> None:
    with PoolAlone(options(python("Model", batch_size=1, arguments={"bias": -1.0}))) as pool:
        pool.begin([range(1)])
        pool.submit(0, item(0))
        with pytest.raises(RewardWorkerStartError, match='raise ValueError\\("no such model"\\)'):
            pool.drain()


def test_an_actor_that_finds_no_gpu_says_what_it_waits_for() -> None:
    with PoolAlone(options(python("Model", batch_size=1, gpus=64, cpus=0.5)), start_timeout_s=1.0) as pool:
        pool.begin([range(1)])
        pool.submit(0, item(0))
        with pytest.raises(RewardWorkerStartError, match=r"longer than 1 s, and may wait for 64 GPUs and 0\.5 CPUs"):
            pool.drain()


def test_a_function_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(RewardWorkerStartError, match="is not on offer"):
        PoolAlone(options(python("trl")))
