"""The supervisor by itself, without Ray: its methods are plain coroutines."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from actors import incarnation
from actors.engine.shared_rollouts import pack
from actors.incarnation import StreamEnds
from actors.rollout_worker import RolloutWorker
from contracts.engine import Abort, LoadDrafters, Remember, SaveDrafters, Submit, UpdateWeights
from contracts.rollout import (
    DraftersSaved,
    EngineDiedError,
    EngineFailed,
    Event,
    Finished,
    FinishReason,
    IntArray,
    Progress,
    Request,
)
from models.checksum import checksum
from models.manifest import WeightsManifest
from tests.actors.fake_engine import FakeEngine, FakeOptions, make_request, response

DEADLINE_S = 120.0


def worker(**options: object) -> RolloutWorker:
    return RolloutWorker("w", partial(FakeEngine, FakeOptions(**options)))


def array(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


async def read(stream: AsyncGenerator[list[Event], None], until: int) -> list[Event]:
    """Events up to the `until`-th Finished, or the end."""
    events: list[Event] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in stream:
            events += batch
            if sum(isinstance(e, Finished) for e in events) >= until:
                break
    return events


def finished_and_said(events: Sequence[object], request: Request) -> tuple[list[int], list[int]]:
    """The tokens of the request, which has ended as it must, and those that were reported before."""
    [rollout] = [e.rollout for e in events if isinstance(e, Finished) and e.rollout.request_id == request.request_id]
    tokens, reason = response(request)
    assert (rollout.tokens.tolist(), rollout.finish_reason) == (tokens, reason)
    deltas = [e.delta.tokens for e in events if isinstance(e, Progress) and e.request_id == request.request_id]
    return tokens, np.concatenate([np.zeros(0, np.int32), *deltas]).tolist()


@pytest.mark.asyncio
async def test_streams_progress_and_rollouts_and_allows_one_reader() -> None:
    w = worker()
    with pytest.raises(EngineDiedError, match="w has no engine: none"):
        await w.tell(Submit((make_request(0),)))
    await w.restart_engine()
    stream = w.stream()
    requests = [make_request(i) for i in range(5)]
    await w.tell(Submit(tuple(requests)))
    events = await read(stream, 5)
    for request in requests:
        tokens, said = finished_and_said(events, request)
        assert said == tokens[: len(said)]
        assert len(tokens) - len(said) <= 4 + 1
    with pytest.raises(RuntimeError, match="already being read"):
        await anext(w.stream())
    await w.shutdown()
    assert (await w.status()).engine == "none"
    assert [e async for e in stream] == []  # the end of an engine is the end of its stream


@pytest.mark.asyncio
async def test_a_stream_ends_after_so_many_lists_and_the_next_one_goes_on() -> None:
    w = worker()
    await w.restart_engine()
    requests = [make_request(i) for i in range(7)]
    await w.tell(Submit(tuple(requests)))
    events, streams = list[object](), 0
    async with asyncio.timeout(DEADLINE_S):
        while sum(isinstance(e, Finished) for e in events) < 7:
            lists = [batch async for batch in w.stream(2)]
            streams += 1
            assert len(lists) == 2
            assert isinstance(lists[1].pop(), StreamEnds)
            events += [event for batch in lists for event in batch]
            if streams == 1:
                await w.tell(Submit(tuple(make_request(i) for i in range(7, 12))))
    assert not any(isinstance(event, StreamEnds) for event in events)
    for request in requests:
        tokens, said = finished_and_said(events, request)
        assert said == tokens[: len(said)], "nothing is lost or repeated between two streams"
    await w.shutdown()


@pytest.mark.asyncio
async def test_an_abort_does_not_overtake_its_requests_while_training_stops() -> None:
    stopped = asyncio.Event()

    class StopsLate:
        async def begin_work(self, requests: int) -> None:
            await stopped.wait()

    w = worker(step_s=0.01)
    await w.restart_engine()
    w._spot = StopsLate()  # type: ignore[assignment]
    stream = w.stream()
    submitted = asyncio.create_task(w.tell(Submit((make_request(0, max_new_tokens=60),))))
    await asyncio.sleep(0)
    aborted = asyncio.create_task(w.tell(Abort((0,))))
    await asyncio.sleep(0.05)
    stopped.set()
    await asyncio.wait_for(asyncio.gather(submitted, aborted), DEADLINE_S)
    [rollout] = [event.rollout for event in await read(stream, 1) if isinstance(event, Finished)]
    assert rollout.finish_reason is FinishReason.ABORT
    w._spot = None
    await w.shutdown()


@pytest.mark.asyncio
async def test_what_nobody_waits_for_goes_with_the_next_event_that_somebody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incarnation, "_HOLD_S", 1000.0)
    w = worker()
    await w.restart_engine()
    stream = w.stream()
    await w.tell(Submit(tuple(make_request(i) for i in range(5))))
    batches: list[list[Event]] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in stream:
            batches.append(batch)
            if sum(isinstance(e, Finished) for batch in batches for e in batch) == 5:
                break
    assert all(any(isinstance(e, Finished) for e in batch) for batch in batches)
    assert any(isinstance(e, Progress) for batch in batches for e in batch)
    await w.shutdown()


@pytest.mark.asyncio
async def test_weights_are_answered_while_requests_run_and_fail_with_the_engine() -> None:
    w = worker(step_s=0.002, poison=99)
    await w.restart_engine()
    stream = w.stream()
    await w.tell(Submit(tuple(make_request(i, max_new_tokens=60) for i in range(4))))
    buffer = np.arange(10_000, dtype=np.uint8)
    manifest = WeightsManifest(4, checksum(buffer), (), buffer.nbytes)
    loaded = await asyncio.wait_for(w.ask(UpdateWeights(manifest), buffer), DEADLINE_S)
    assert (loaded.version, loaded.checksum) == (4, manifest.checksum)
    assert (await w.status()).weights_version == 4
    pending = asyncio.create_task(w.tell(Submit((make_request(99),))))

    async def load_until_it_dies() -> None:
        for version in range(5, 10_000):
            late = WeightsManifest(version, manifest.checksum, (), buffer.nbytes)
            await w.ask(UpdateWeights(late), buffer)

    with pytest.raises(EngineDiedError):
        await asyncio.wait_for(load_until_it_dies(), DEADLINE_S)
    await asyncio.wait_for(pending, DEADLINE_S)
    events = await read(stream, 10_000)
    assert isinstance(events[-1], EngineFailed)
    assert "exit code 3" in events[-1].reason
    status = await w.status()
    assert (status.engine, status.reason) == ("failed", events[-1].reason)
    status = await asyncio.wait_for(w.restart_engine(), DEADLINE_S)
    assert (status.engine, status.restarts, status.weights_version) == ("running", 1, None)
    fresh = w.stream()
    await w.tell(Submit((make_request(3),)))
    assert any(isinstance(e, Finished) for e in await read(fresh, 1))
    await w.shutdown()


@pytest.mark.asyncio
async def test_drafters_hear_of_other_workers_and_are_saved(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    w = worker(notes=str(notes))
    shared = pack([(array(1), array(2, 3), 0), (array(4, 5), array(6), 1), (array(7), array(8), 2)])
    with pytest.raises(EngineDiedError):
        await w.tell(Remember(1), shared)
    with pytest.raises(EngineDiedError):
        await w.ask(SaveDrafters(str(tmp_path)))
    await w.restart_engine()
    await w.tell(Remember(1), shared)
    await w.tell(LoadDrafters("earlier"))
    assert await asyncio.wait_for(w.ask(SaveDrafters(str(tmp_path))), DEADLINE_S) == DraftersSaved(str(tmp_path))
    assert (tmp_path / "index").read_text() == "drafts"
    saved = await asyncio.wait_for(w.ask(SaveDrafters(str(tmp_path / "missing"))), DEADLINE_S)
    assert "missing" in saved.failure
    told = [json.loads(line) for line in notes.read_text().splitlines()]  # before the save, and so written by now
    assert told == [{"remember": [[[1], [2, 3]], [[7], [8]]]}, {"load": "earlier"}]
    with pytest.raises(TypeError, match="SaveDrafters is answered: ask it"):
        await w.tell(SaveDrafters(str(tmp_path)))
    await w.shutdown()


@pytest.mark.asyncio
async def test_a_save_ends_with_its_engine(tmp_path: Path) -> None:
    w = worker(mute_drafters=True, poison=9)
    await w.restart_engine()
    saving = asyncio.create_task(w.ask(SaveDrafters(str(tmp_path))))
    await w.tell(Submit((make_request(9),)))
    with pytest.raises(EngineDiedError, match="exit code 3"):
        await asyncio.wait_for(saving, DEADLINE_S)
    with pytest.raises(EngineDiedError, match="exit code 3"):
        await w.tell(LoadDrafters("x"))
    with pytest.raises(EngineDiedError, match="exit code 3"):
        await w.ask(SaveDrafters(str(tmp_path)))
    await w.shutdown()


@pytest.mark.asyncio
async def test_factory_failure_is_raised_and_remembered() -> None:
    w = worker(fail_to_start="out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await w.restart_engine()
    status = await w.status()
    assert (status.engine, status.reason) == ("failed", "RuntimeError: out of memory")
