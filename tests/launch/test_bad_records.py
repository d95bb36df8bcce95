"""A record that cannot grade anything: from the collector's item to the groups that train, without Ray."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.data.prompts import Prompt
from actors.rewards import Grade, GradeItem
from config.objective import ObjectiveOptions
from contracts.rollout import FinishReason, Rollout, Sampled, SamplingParams
from launch.batch import Batch, Pick
from launch.dispatch import DispatchStats
from launch.run.collect import Collector, Round
from launch.run.groups import training_sequences
from launch.run.record import rollout_metrics
from tests.context import run_context

PROMPTS = [
    Prompt(
        prompt_id=i,
        uid=str(i),
        text="1+1=",
        tokens=np.array([1, 2], np.int32),
        record={"answer": "2"},
        where=f"a.jsonl, line {i + 1}",
    )
    for i in range(3)
]
BAD = Grade(value=0.0, error="math: a.jsonl, line 2: no gold", bad_record=True)
GRADES = [
    Grade(value=1.0),
    Grade(value=0.0),
    BAD,
    Grade(value=1.0),
    Grade(value=0.0),
    Grade(value=1.0),
]  # two per prompt


def rollout(request_id: int) -> Rollout:
    zeros = np.zeros(1, np.float32)
    return Rollout(
        request_id=request_id,
        sampled=Sampled(np.array([3], np.int32), zeros, zeros),
        finish_reason=FinishReason.STOP,
        weights_version=0,
        started_s=0.0,
        finished_s=1.0,
    )


class Dispatcher:
    collector: Any = None
    done = False

    def begin(self, requests: Any, *, watch: bool = False) -> None:
        self._requests = requests

    def wait(self, until: Any) -> None:
        for request in self._requests:
            assert not until()
            self.collector.ended(rollout(request.request_id))
        self.done = True
        assert until()

    def end(self, *, abort: bool) -> DispatchStats:
        assert not abort
        return DispatchStats(
            requests=6,
            finished=6,
            failed=(),
            reissued=0,
            lost_workers=0,
            duplicates=0,
            tokens=6,
            preempted=0,
            seconds=1.0,
            sampled_by=dict.fromkeys(range(6), "rollout-0"),
        )


class Rewards:
    def __init__(self) -> None:
        self.items: list[GradeItem] = []

    def begin(self, groups: Any, *, same_step: bool) -> None: ...
    def submit(self, key: int, item: GradeItem) -> None:
        self.items.append(item)

    def drain(self) -> dict[int, Grade]:
        return dict(enumerate(GRADES))


def collect() -> tuple[Round, list[GradeItem]]:
    rewards = Rewards()
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "2")
    observer = SimpleNamespace(progress=lambda *_: None)
    dispatcher: Any = Dispatcher()
    collector: Any = Collector(run_context(observer=observer), dispatcher, rewards, tokenizer)
    dispatcher.collector = collector
    picks = [Pick(0, prompt) for prompt in PROMPTS]
    batch = Batch(picks, [2] * 3, SamplingParams(4), seed=0, expected_tokens=[1.0] * 3)
    return collector.run(batch, "rollout"), rewards.items


def test_the_grader_is_told_where_the_record_stands() -> None:
    _, items = collect()
    assert [item.where for item in items[::2]] == [f"a.jsonl, line {i}" for i in (1, 2, 3)]


def test_the_whole_group_of_a_bad_record_is_left_out_and_counted_and_is_no_failure() -> None:
    collected, _ = collect()
    sequences, metrics = training_sequences(collected.groups, ObjectiveOptions(), prompts_per_step=3, max_new_tokens=8)
    assert len(sequences) == 4  # the right answer of the bad record's group taught nothing either
    assert metrics["groups/used"] == 2
    assert metrics["groups/ungraded"] == metrics["groups/bad_record"] == 1
    assert rollout_metrics([collected])["rollouts/failed"] == 0
    assert rollout_metrics([collected])["reward/mean"] == 0.5
