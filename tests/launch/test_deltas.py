"""Which deltas a hand-over has: the chain, its bounds, and when the default stops."""

import asyncio
from collections.abc import Generator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ObjectLostError

from actors.learner import PublishedDelta
from actors.rollout_worker import RolloutWorker
from launch.dispatch.seat import Delta, Deltas, Seat, SeatState, Weights
from launch.dispatch.weights import Loading
from launch.run.deltas import DeltaChoice
from models.checksum import checksum
from models.delta import Held, encode
from models.manifest import WeightsManifest, lay_out
from tests.actors.fake_engine import FakeEngine, FakeOptions

TENSORS, TOTAL = lay_out([("w", "bfloat16", (60, 100)), ("q", "int8", (70, 90))])


class Heard:
    """The observer, for its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, kind: str, message: str) -> None:
        self.events.append(f"{kind}: {message}")


def choice(wanted: Any = "auto") -> tuple[DeltaChoice, list[str]]:
    heard = Heard()
    return DeltaChoice(wanted, cast(Any, heard)), heard.events


def whole(version: int) -> WeightsManifest:
    return WeightsManifest(version, version, TENSORS, 1000)


def found(version: int, size: int = 10, base: int | None = None) -> PublishedDelta:
    return PublishedDelta(version - 1 if base is None else base, cast(Any, f"ref {version}"), size, 0.01, 0.0)


def test_a_chain_is_bounded_in_deltas_and_in_bytes_and_begins_anew_after_a_gap() -> None:
    deltas, _ = choice("always")

    def versions(version: int, delta: PublishedDelta | None) -> list[int]:
        assert deltas.share(elsewhere=False) == 1.0
        made = deltas.deltas(whole(version), delta, "home")
        assert made is not None
        assert made.home == ""
        return [each.version for each in made.chain]

    assert versions(0, None) == []
    for version in range(1, 30):
        chain = versions(version, found(version))
        assert chain == list(range(max(1, version - 15), version + 1))
    assert versions(30, found(30, 400)) == list(range(20, 31)), "half of 1000 bytes"
    assert versions(31, found(31, 700)) == [31], "the last one always"
    assert versions(32, found(32)) == [32]
    assert versions(33, PublishedDelta(32, None, 0, 1.0, 0.0)) == []
    assert versions(34, found(34)) == [34]
    assert versions(36, found(36, base=34)) == [34, 36], "by base, not by number"
    assert versions(40, found(40)) == [40], "a version is missing"
    assert versions(41, None) == [], "the learner was replaced"


def decided(delta_s: list[float], whole_s: float = 1.0, updates: int = 12) -> tuple[list[float], list[str]]:
    """What the learner may make at each update, and the events."""
    deltas, events = choice()
    shares, pauses_s = [], iter(delta_s)
    for version in range(updates):
        share = deltas.share(elsewhere=True)
        shares.append(share)
        made = deltas.deltas(whole(version), found(version) if share and version else None, "home")
        by_delta = made is not None and bool(made.chain)
        deltas.took(next(pauses_s, delta_s[-1]) if by_delta else whole_s, by_delta=by_delta)
        assert deltas.share(elsewhere=False) == 0.0
        assert deltas.deltas(whole(version), None, "home") is None
    return shares, events


def test_auto_compares_pauses_and_stops_where_deltas_take_longer() -> None:
    shares, events = decided([0.9, 5.0, 1.01])
    assert shares == [0.25, 0.25, 0, 0.25, 0, 0.25, 0, *[0.25] * 5]
    assert events == [
        "weights_delta_kept: new weights take 1.01 s as deltas, 1 s whole, medians of 3 updates each: "
        "deltas go on (cluster.weights_delta)"
    ]
    shares, events = decided([0.9, 1.03])
    assert shares == [0.25, 0.25, 0, 0.25, 0, 0.25, 0, *[0] * 5]
    assert [event.partition(":")[0] for event in events] == ["weights_delta_given_up"]


def test_auto_stops_where_deltas_are_large_and_never_never_looks() -> None:
    deltas, events = choice()
    for version in range(5):
        share = deltas.share(elsewhere=True)
        assert (share > 0) == (version < 4)
        deltas.deltas(whole(version), PublishedDelta(version - 1, None, 0, 1.0, 0.0) if version and share else None, "")
    assert "what changed was no smaller than 25%" in events[0]
    never, events = choice("never")
    assert not never.by_pieces
    assert never.share(elsewhere=True) == 0.0
    assert never.deltas(whole(1), None, "") is None
    assert events == []


@pytest.fixture(autouse=True)
def no_name_server() -> Generator[None]:
    """Workers ask for their address, which takes a second without a network."""
    with patch("ray.util.get_node_ip_address", lambda: ""):
        yield


# Whole buffers and deltas, through the driver's and the workers' own code, without Ray.

LOST = ObjectLostError("ff" * 28, "", "")


class There:
    """In place of a reference: a value, or the loss of it. Counts the bytes that are fetched."""

    def __init__(self, value: Any, fetched: list[int] | None = None) -> None:
        self.value, self._fetched = value, fetched

    def __await__(self) -> Generator[None, None, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        if self._fetched is not None:
            self._fetched.append(self.value.size)
        yield
        return self.value


class Direct:
    """A worker's handle that calls it in this process, as Ray does: later, and in order."""

    def __init__(self, worker: Any, calls: list[Any]) -> None:
        self._worker, self._calls = worker, calls

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            call = partial(getattr(self._worker, method), *arguments)
            self._calls.append(call)
            return call

        return SimpleNamespace(remote=remote)


class World:
    """Two nodes with two workers each, the learner's weights, and what the driver keeps of both."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self.choice, self.events = choice("always")
        self._seats: dict[str, Seat] = {}
        self._calls: list[Any] = []
        self.fetched: list[int] = []
        self.weights: Weights | None = None
        self._held: Held | None = None
        seats = SimpleNamespace(
            by_name=self._seats,
            options=SimpleNamespace(weight_sync_timeout_s=9.0),
            requests=SimpleNamespace(expect=lambda version: None),
            enter=lambda seat, state, limit_s=0.0: setattr(seat, "state", state),
            ready=lambda seat: setattr(seat, "state", SeatState.READY),
            wait=lambda until: None,
            context=SimpleNamespace(wall=lambda: 0.0, observer=Heard()),
        )
        self.refused = seats.context.observer.events
        self.loading = Loading(cast(Any, seats), cast(Any, None))
        self._versions = 0

    async def join(self, name: str, node: str) -> None:
        """A worker of that name with a new process."""
        if name in self._seats:
            await cast(Any, self._seats[name]).handle._worker.shutdown()
        worker = RolloutWorker(name, partial(FakeEngine, FakeOptions()))
        loop: Any = SimpleNamespace(expect=lambda *_: None, forget=lambda *_: None)
        spans: Any = SimpleNamespace(other=lambda *_: None)
        handle: Any = Direct(worker, self._calls)
        self._seats[name] = Seat(name=name, handle=handle, spans=spans, loop=loop)
        await self.restart(name, node)

    async def restart(self, name: str, node: str) -> None:
        """Its engine starts anew, in the process that it has."""
        seat = self._seats[name]
        seat.forget_answer()
        self._calls.clear()
        seat.start_engine()
        status = await self._calls.pop()()
        seat.node_id, seat.held_version = node, status.base_version
        if self.loading.begin(seat):
            await self._answers()
        else:
            seat.state = SeatState.READY

    async def update(self, size: int, lost: int, stale: int) -> None:
        """New weights, of which `size` elements change. `lost`: how many of the chain's deltas are gone, from the
        oldest; `stale`: the last delta is another one (0: it is right, 1: of before, 2: damaged)."""
        old, buffer = self._held, self._random.integers(0, 256, TOTAL, dtype=np.uint8)
        if old is not None:
            buffer = old.buffer.copy()
            buffer[self._random.integers(0, 12_000, size)] ^= 9
        self._versions += 1
        new = Held(WeightsManifest(self._versions, checksum(buffer), TENSORS, TOTAL), buffer)
        self.choice.share(elsewhere=True)
        delta = None if old is None else encode(old, new, limit_bytes=TOTAL)
        made = None
        if old is not None and delta is not None:
            if stale == 2:
                delta = delta.copy()
                delta[-1] ^= 1
            ref: Any = There(delta, self.fetched)
            if stale == 1 and self.weights is not None and self.weights.deltas and self.weights.deltas.chain:
                ref = self.weights.deltas.chain[-1].ref
            made = PublishedDelta(old.manifest.version, ref, delta.size, 0.0, 0.0)
        deltas = self.choice.deltas(new.manifest, made, "")
        assert deltas is not None
        for each in deltas.chain[:lost]:
            cast(Any, each.ref).value = LOST
        self._held = new
        self.weights = Weights(new.manifest, cast(Any, There(buffer, self.fetched)), deltas)
        self.loading.set(self.weights)
        await self._answers()

    async def _answers(self) -> None:
        calls, loading = list(self._calls), [s for s in self._seats.values() if s.state is SeatState.LOADING]
        self._calls.clear()
        for seat in loading:
            assert seat.pending in calls
            self.loading.answered(seat, await cast(Any, seat.pending)())  # checks version and checksum
            seat.pending = None

    def check(self) -> None:
        """Every worker holds the learner's bits."""
        assert self._held is not None
        for seat in self._seats.values():
            base = cast(Any, seat.handle)._worker._base
            assert base.holds(self._held.manifest)
            assert np.array_equal(base._buffer, self._held.buffer)
            assert seat.held_version == self._versions

    async def close(self) -> None:
        for seat in self._seats.values():
            await cast(Any, seat.handle)._worker.shutdown()


ACTS = st.one_of(
    st.tuples(
        st.just("update"), st.sampled_from([3, 40, 900, 9000]), st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 2])
    ),
    st.tuples(st.just("join"), st.integers(0, 3)),
    st.tuples(st.just("restart"), st.integers(0, 3)),
)


@settings(max_examples=5, deadline=None)
@given(st.lists(ACTS, min_size=4, max_size=8), st.integers(0, 2**32))
def test_whatever_happens_every_worker_holds_the_bits_of_a_full_copy(acts: list[Any], seed: int) -> None:
    """Updates of any size whose deltas are lost, stale or damaged, new workers, and engines that start anew."""

    async def run() -> None:
        world = World(np.random.default_rng(seed))
        for number in range(4):
            await world.join(f"w{number}", f"node {number // 2}")
        await world.update(0, 0, 0)
        for act in acts:
            match act:
                case ("update", size, lost, stale):
                    await world.update(size, lost, stale)
                case ("join", number):
                    await world.join(f"w{number}", f"node {number // 2}")
                case ("restart", number):
                    await world.restart(f"w{number}", f"node {number // 2}")
            world.check()
        await world.close()

    asyncio.run(run())


def test_a_joiner_fetches_fewer_bytes_than_the_whole_where_its_node_has_a_base() -> None:
    async def run() -> None:
        world = World(np.random.default_rng(0))
        await world.join("a", "node 0")
        await world.update(0, 0, 0)
        for _ in range(5):
            await world.update(3, 0, 0)
        await world.restart("a", "node 0")
        world.fetched.clear()
        await world.restart("a", "node 0")
        assert world.fetched == [], "its process still has them"
        await world.join("a", "node 0")
        *base, last = world.fetched[:1], sum(world.fetched[1:])
        assert base == [[TOTAL]], "from its own node"
        assert 0 < last < TOTAL / 10
        world.fetched.clear()
        await world.join("b", "node 1")
        assert world.fetched == [TOTAL], "a node without a base: the whole is fewer bytes than a base and deltas"
        for _ in range(3):
            await world.update(3000, 0, 0)
        world.check()
        world.fetched.clear()
        await world.join("b", "node 1")
        assert world.fetched == [TOTAL], "the chain's bytes are bounded, so it does not reach back"
        world.fetched.clear()
        await world.join("b", "node 1")
        assert sum(world.fetched) == TOTAL, "the present weights themselves"
        assert world.refused == []
        await world.close()

    asyncio.run(run())


@pytest.mark.parametrize(("version", "expected"), [(None, []), (0, []), (1, [2, 3]), (2, [3]), (3, [])])
def test_a_chain_is_cut_where_a_worker_stands(version: int | None, expected: list[int]) -> None:
    chain = tuple(Delta(v - 1, v, cast(Any, None), 1) for v in (2, 3))
    assert [delta.version for delta in Deltas("", chain).since(version)] == expected
