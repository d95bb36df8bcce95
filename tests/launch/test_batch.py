"""Who owns request ids: prompts with any number of samples, and rounds of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data import Prompt
from actors.rewards import Grade, GradeItem
from config.drafter import BufferOptions
from config.objective import ObjectiveOptions
from contracts.records import SequenceRecord
from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams
from drafter.training.buffer import DataBuffer
from launch.batch import EVAL_EPOCH, Batch, Pick
from launch.dispatch import DispatchStats
from launch.run.collect import Collector, Round
from launch.run.groups import training_sequences
from tests.context import run_context

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def picks(count: int, epoch: int = 0) -> list[Pick]:
    return [
        Pick(epoch, Prompt(prompt_id=i, uid=str(i), text=f"p{i}", tokens=np.array([1, 2, i], np.int32), record={}))
        for i in range(count)
    ]


def batch_of(counts: list[int], epoch: int = 0, first_id: int = 0) -> Batch:
    given = picks(len(counts), epoch)
    expected = [float(i) for i in range(len(counts))]
    return Batch(given, counts, SamplingParams(8), seed=3, expected_tokens=expected, first_id=first_id)


@given(COUNTS, st.integers(0, 1000))
def test_ids_are_dense_in_canonical_order_and_lead_back_to_pick_and_sample(counts: list[int], first_id: int) -> None:
    batch = batch_of(counts, first_id=first_id)
    assert [r.request_id for r in batch.requests] == list(range(first_id, batch.next_id))
    assert len(batch) == sum(counts)
    places = [(index, sample) for index, count in enumerate(counts) for sample in range(count)]
    assert [batch.place(r.request_id) for r in batch.requests] == places
    for request, (index, sample) in zip(batch.requests, places, strict=True):
        assert batch.ids(index)[sample] == request.request_id
        assert batch.prompt(request.request_id) is batch.picks[index].prompt
        assert request.prompt_id == batch.picks[index].prompt.prompt_id
        assert request.expected_tokens == float(index)
    for stranger in (first_id - 1, batch.next_id):
        with pytest.raises(KeyError, match="is not of this batch"):
            batch.place(stranger)


@given(COUNTS, st.data())
def test_counts_decide_which_samples_exist_and_never_what_they_are(counts: list[int], data: st.DataObject) -> None:
    """All that tokens depend on: prompt, sampling parameters, noise key."""

    def samples(batch: Batch) -> dict[tuple[int, int], Request]:
        return {batch.place(r.request_id): r for r in batch.requests}

    others = data.draw(st.lists(st.integers(1, 40), min_size=len(counts), max_size=len(counts)))
    one, other = samples(batch_of(counts)), samples(batch_of(others, first_id=7))
    for place in one.keys() & other.keys():
        a, b = one[place], other[place]
        assert (a.noise_key, a.prompt_id, a.sampling) == (b.noise_key, b.prompt_id, b.sampling)
        assert a.prompt_tokens.tolist() == b.prompt_tokens.tolist()
    assert len({r.noise_key for r in one.values()}) == len(one)  # and no two samples share their noise


def test_an_evaluation_is_known_by_its_epoch() -> None:
    assert all(r.evaluation for r in batch_of([2, 3], epoch=EVAL_EPOCH).requests)
    assert not any(r.evaluation for r in batch_of([2, 3]).requests)


def test_a_pick_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        batch_of([2, 0])


class Dispatcher:
    """Answers in the order of `arrival`; response i has i % 5 + 1 tokens."""

    def __init__(self, arrival: Any, lost: set[int]) -> None:
        self._arrival, self._lost = arrival, lost
        self.shared: list[Any] = []
        self.drafters = self
        self.collector: Any = None

    def begin(self, requests: Any, *, watch: bool = False) -> None:
        self._order = list(requests)
        self._arrival(self._order)

    @property
    def done(self) -> bool:
        return not self._left

    def wait(self, until: Any) -> None:
        self._left = True
        assert not until()
        for request in self._order:
            if request.request_id not in self._lost:
                self.collector.ended(response(request.request_id))
        self._left = False
        assert until()

    def end(self, *, abort: bool) -> DispatchStats:
        assert not abort
        order = self._order
        made_by = {r.request_id: f"w{r.request_id % 3}" for r in order}
        return DispatchStats(
            requests=len(order),
            finished=len(order),
            failed=(),
            reissued=0,
            lost_workers=0,
            duplicates=0,
            tokens=6,
            preempted=0,
            seconds=1.0,
            sampled_by=made_by,
        )

    def share(self, rollouts: Any) -> None:
        self.shared = rollouts


def response(request_id: int) -> Rollout:
    zeros = np.zeros(request_id % 5 + 1, np.float32)
    tokens = np.full(request_id % 5 + 1, request_id, np.int32)
    return Rollout(
        request_id=request_id,
        sampled=Sampled(tokens, zeros, zeros),
        finish_reason=FinishReason.STOP,
        weights_version=0,
        started_s=0.0,
        finished_s=1.0,
    )


class Rewards:
    def __init__(self) -> None:
        self.items: dict[int, GradeItem] = {}

    def begin(self, groups: Any, *, same_step: bool) -> None:
        self.items.clear()

    def submit(self, key: int, item: GradeItem) -> None:
        self.items[key] = item

    def drain(self) -> dict[int, Grade]:
        return {key: Grade(value=float(key % 2)) for key in self.items}


def collect(batch: Batch, arrival: Any, lost: set[int]) -> tuple[Round, Dispatcher, Rewards]:
    dispatcher, rewards = Dispatcher(arrival, lost), Rewards()
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: str(tokens[0]))
    observer = SimpleNamespace(progress=lambda *_: None)
    collector: Any = Collector(run_context(observer=observer), dispatcher, rewards, tokenizer, share=True)
    dispatcher.collector = collector
    return collector.run(batch, "rollout"), dispatcher, rewards


@settings(deadline=None)
@given(COUNTS, st.integers(0, 50), st.randoms(use_true_random=False), st.data())
def test_a_round_of_any_counts_is_grouped_graded_shared_and_learned_by_prompt(
    counts: list[int], first_id: int, random: Any, data: st.DataObject
) -> None:
    batch = batch_of(counts, first_id=first_id)
    lost = data.draw(st.sets(st.sampled_from([r.request_id for r in batch.requests]), max_size=3))
    collected, dispatcher, rewards = collect(batch, random.shuffle, lost)
    assert [g.pick for g in collected.groups] == list(batch.picks)
    for index, group in enumerate(collected.groups):
        assert [m.rollout.request_id for m in group.members] == [i for i in batch.ids(index) if i not in lost]
        for member in group.members:
            request_id = member.rollout.request_id
            assert member.text == str(request_id)
            assert rewards.items[request_id].prompt == group.pick.prompt.text
            assert (member.grade.value, member.worker) == (float(request_id % 2), f"w{request_id % 3}")
    arrived = [m.rollout.request_id for m in collected.members]
    assert arrived == sorted(arrived)
    assert [(int(t[0]), w) for _, t, w in dispatcher.shared] == [(i, f"w{i % 3}") for i in arrived]
    assert [p.tolist() for p, _, _ in dispatcher.shared] == [batch.prompt(i).tokens.tolist() for i in arrived]
    trained, metrics = training_sequences(
        collected.groups, ObjectiveOptions(), prompts_per_step=len(counts), max_new_tokens=8
    )
    prompts = {index: [r for r in trained if r.prompt_tokens[2] == index] for index in range(len(counts))}
    used = [p for p in prompts.values() if p]
    assert metrics["groups/used"] == len(used)
    assert all(abs(sum(r.advantage for r in p)) < 1e-6 * len(p) for p in used)  # relative to its own group


def test_rounds_of_one_rl_step_keep_their_records_of_hidden_states_apart() -> None:
    """The buffer knows a record by its version and its request."""
    first = batch_of([2, 1])
    second = batch_of([3], first_id=first.next_id)
    buffer = DataBuffer(BufferOptions())
    for request in (*first.requests, *second.requests):
        states = np.zeros((2, 8), np.uint8)
        buffer.add(
            [
                SequenceRecord(
                    tokens=np.array([1, 2, 3], np.int32),
                    prompt_length=1,
                    first=0,
                    states=states,
                    dtype="float32",
                    width=2,
                    target_version=5,
                    request_id=request.request_id,
                )
            ]
        )
    assert len(buffer.sample(10**6, 5)) == 6
