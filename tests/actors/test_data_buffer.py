"""The data buffer as an actor: what goes in comes out, whoever dies meanwhile."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from actors.data_buffer import DataBufferActor
from config.drafter import BufferOptions
from contracts.records import SequenceRecord

pytestmark = pytest.mark.ray
TIMEOUT_S = 60.0


def record(request_id: int, version: int = 3, rows: int = 200, width: int = 256) -> SequenceRecord:
    rng = np.random.default_rng(request_id)
    return SequenceRecord(
        tokens=rng.integers(0, 99, rows + 1).astype(np.int32),
        prompt_length=5,
        first=0,
        states=rng.integers(0, 255, (rows, 4 * width)).astype(np.uint8),
        dtype="float32",
        width=width,
        target_version=version,
        request_id=request_id,
    )


@pytest.fixture
def buffer(ray_head: str) -> Iterator[Any]:
    options = BufferOptions(max_bytes=1 << 21)
    actor = ray.remote(DataBufferActor).options(num_cpus=0, max_restarts=1).remote(options, seed=1)
    yield actor
    ray.kill(actor)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=TIMEOUT_S)


def test_records_come_back_as_they_were_without_a_copy(buffer: Any) -> None:
    records = [record(i) for i in range(4)]
    assert get(buffer.add.remote([ray.put(records[:3]), ray.put(records[3:])])) == 4
    drawn = get(buffer.sample.remote(10_000, version=3))
    assert sorted(r.request_id for r in drawn) == [0, 1, 2, 3]
    for got in drawn:
        want = records[got.request_id]
        assert got.tokens.tolist() == want.tokens.tolist()
        assert np.array_equal(got.states, want.states)
        assert (got.prompt_length, got.first, got.dtype, got.width, got.target_version) == (5, 0, "float32", 256, 3)
        assert not got.states.flags.owndata  # a view of the object store
        assert not got.states.flags.writeable
    stats = get(buffer.stats.remote())
    assert (stats.sequences, stats.drawn, stats.draws) == (4, 4, 1)


def test_the_limit_holds_and_the_newest_stay(buffer: Any) -> None:
    for version in range(6):
        get(buffer.add.remote([ray.put([record(10 * version + i, version) for i in range(4)])]))
        stats = get(buffer.stats.remote())
        assert stats.bytes <= stats.max_bytes == 1 << 21
        assert stats.versions[version] == 4
    assert stats.evicted > 0


@ray.remote(num_cpus=0)
class Maker:
    """A worker that records something and dies."""

    def hand_over(self, buffer: Any) -> int:
        added: int = ray.get(buffer.add.remote([ray.put([record(1)])]), timeout=TIMEOUT_S)
        return added

    def put(self) -> list[Any]:
        return [ray.put([record(2)])]


def test_what_it_has_outlives_its_maker_and_what_it_has_not_is_left_out(buffer: Any) -> None:
    maker = Maker.remote()  # type: ignore[attr-defined]
    assert get(maker.hand_over.remote(buffer)) == 1
    (orphan,) = get(maker.put.remote())
    ray.kill(maker)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            get(maker.put.remote())
        except ray.exceptions.RayActorError:
            break
    assert get(buffer.add.remote([orphan, ray.put([record(3)])])) in (1, 2)  # its last object may still be there
    drawn = get(buffer.sample.remote(10_000, version=3))
    assert {1, 3} <= {r.request_id for r in drawn}
    assert all(np.array_equal(r.states, record(r.request_id).states) for r in drawn)


def test_what_is_made_again_after_a_loss_is_kept_once(buffer: Any) -> None:
    """Two responses may be alike, so it goes by who recorded when."""
    [first, again] = [ray.put([record(1)]) for _ in range(2)]
    added = [buffer.add.remote([ref], source="learner-0 of version 3") for ref in (first, again)]
    added += [buffer.add.remote([first], source=source) for source in ("learner-1 of version 3", "", "")]
    of_the_first, of_the_second, *others = ray.get(added, timeout=TIMEOUT_S)
    assert (of_the_first + of_the_second, others) == (1, [1, 1, 1])  # whichever Ray lets go first
    assert ray.get(buffer.stats.remote(), timeout=TIMEOUT_S).added == 4


def test_something_else_is_refused_and_says_what_it_takes(buffer: Any) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="SequenceRecord"):
        get(buffer.add.remote([ray.put(["rows"])]))
    assert get(buffer.stats.remote()).sequences == 0


def test_started_anew_it_is_empty_and_goes_on(buffer: Any) -> None:
    get(buffer.add.remote([ray.put([record(1)])]))
    ray.kill(buffer, no_restart=False)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:  # The one that is to die may still answer.
            if get(buffer.stats.remote()).sequences == 0:
                break
        except ray.exceptions.RayActorError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert get(buffer.add.remote([ray.put([record(2)])])) == 1
    assert [r.request_id for r in get(buffer.sample.remote(1, version=3))] == [2]
