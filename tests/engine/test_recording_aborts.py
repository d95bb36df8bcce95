"""Recording is an extra: whatever is aborted, and whatever fails in it, the engine goes on and the rest is recorded."""

import copy
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.native.engine import NativeEngine
from actors.engine.native.hidden import recording as module
from actors.engine.native.hidden.recording import SequenceRecorder
from contracts.rollout import Event, FinishReason, Recorded
from models import weights
from models.checkpoint import hf_state_dict
from models.transformer import Transformer
from tests.engine.support import assert_same, drain, engine, make_requests, options_of, rollouts, run, tiny_model
from tests.engine.test_recording import BIG, check, recorded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("aborts"))


def recording_engine(model: Transformer, budget: int = BIG, **options: int) -> NativeEngine:
    return NativeEngine(model, options_of(**options), recording_bytes=budget)


def reports(events: Sequence[Event]) -> list[Recorded]:
    return [event for event in events if isinstance(event, Recorded)]


@settings(max_examples=120, deadline=None)
@given(
    aborts=st.lists(st.tuples(st.integers(0, 60), st.sets(st.integers(0, 15), min_size=1)), max_size=6),
    chunk=st.sampled_from([1, 3, 17, 256]),
    prompts=st.integers(1, 4),
    seed=st.integers(0, 99),
    options=st.sampled_from(
        [
            {"prefill_chunk_tokens": 16},
            {"max_running": 3},
            {"kv_tokens": 160, "max_running": 6},  # preempts
            {"max_running": 16, "prefill_chunk_tokens": 16},
        ]
    ),
)
def test_whoever_is_aborted_and_whenever_all_others_are_recorded_whole(
    model: Transformer,
    aborts: list[tuple[int, set[int]]],
    chunk: int,
    prompts: int,
    seed: int,
    options: dict[str, int],
) -> None:
    requests = make_requests(16, prompts=prompts, seed=seed)
    core = recording_engine(model, **options)
    core.submit(requests)
    events: list[Event] = []
    with mock.patch.object(module, "CHUNK_STEPS", chunk):
        for step in range(61):
            for _, indices in (entry for entry in aborts if entry[0] == step):
                core.abort([requests[index].request_id for index in indices])
            events += core.step()
        events += drain(core)
    finished = {r.request_id: r for r in rollouts(events).values() if r.finish_reason is not FinishReason.ABORT}
    records = recorded(events)
    assert not any(report.failure for report in reports(events))
    assert records.keys() == finished.keys()
    for record in records.values():
        check(model, record)


def test_all_may_be_aborted_between_a_prompt_and_its_chunk(model: Transformer) -> None:
    """As Ctrl-C does: the siblings that have ended wait for rows that their aborted writer computed."""
    requests = make_requests(8, prompts=1, seed=2)
    core = recording_engine(model)
    core.submit(requests)
    events: list[Event] = []
    while len(rollouts(events)) < 3:
        events += core.step()
    core.abort([request.request_id for request in requests])
    events += drain(core)
    ended = {r.request_id for r in rollouts(events).values() if r.finish_reason is not FinishReason.ABORT}
    assert recorded(events).keys() == ended
    assert not core._recording._sequences  # type: ignore[union-attr]


def test_a_record_that_cannot_be_made_is_counted_and_said_once(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(12, prompts=3, seed=4)
    make, bad = SequenceRecorder._record, {requests[2].request_id, requests[7].request_id}

    def record(self: SequenceRecorder, sequence: object) -> object:
        if sequence.request_id in bad:  # type: ignore[attr-defined]
            raise AssertionError("3 rows of 7 tokens were recorded")
        return make(self, sequence)

    monkeypatch.setattr(SequenceRecorder, "_record", record)
    monkeypatch.setattr(module, "CHUNK_STEPS", 1)
    core = recording_engine(model)
    core.submit(requests)
    events = drain(core)
    assert_same(rollouts(events), run(engine(model), requests))
    assert recorded(events).keys() == {request.request_id for request in requests} - bad
    assert sum(report.skipped for report in reports(events)) == len(bad)
    assert [r.failure for r in reports(events) if r.failure] == ["AssertionError: 3 rows of 7 tokens were recorded"]


@pytest.mark.parametrize("method", ["_begin", "_end", "_pick", "_shrink", "_close"])
def test_what_fails_in_it_ends_recording_until_the_next_weights_and_no_rollout(
    model: Transformer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(12, prompts=3, seed=6)
    calls = 0
    real = getattr(SequenceRecorder, method)

    def fails(self: SequenceRecorder, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return real(self, *args)

    monkeypatch.setattr(module, "CHUNK_STEPS", 4)
    changing = copy.deepcopy(model)
    core = recording_engine(changing)
    with monkeypatch.context() as patch:
        patch.setattr(SequenceRecorder, method, fails)
        core.submit(requests)
        events = drain(core)
    assert calls >= 2
    assert_same(rollouts(events), run(engine(model), requests))
    assert [r.failure for r in reports(events) if r.failure] == ["RuntimeError: out of memory"]
    for record in recorded(events).values():
        check(model, record)
    core.update_weights(*weights.pack(dict(hf_state_dict(model)), 1))
    core.submit(requests)
    after = drain(core)
    assert recorded(after).keys() == {request.request_id for request in requests}
    assert not any(report.failure for report in reports(after))
    for record in recorded(after).values():
        check(model, record, 1)


def test_what_is_aborted_takes_no_memory_after_the_next_chunk(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_STEPS", 4)
    requests = make_requests(6, prompts=2, seed=12, max_new_tokens=30)
    core = recording_engine(model, prefill_chunk_tokens=16)
    core.submit(requests)
    core.step()
    core.abort([request.request_id for request in requests[:5]])
    for _ in range(8):
        core.step()
    kept = core._recording._sequences.values()  # type: ignore[union-attr]
    assert len(kept) == 1
    assert np.all([sequence.request_id == -1 for sequence in kept])  # the one that still runs
