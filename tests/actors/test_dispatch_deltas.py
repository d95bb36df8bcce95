"""Weights as what changed, through real Ray actors: who makes the new of the old, and who takes them whole."""

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError

from actors.rollout_worker import RolloutWorker
from contracts.rollout import Rollout
from launch.dispatch import Delta, Deltas, SeatState, worker_name
from models.checksum import checksum
from models.delta import Held, encode
from models.manifest import WeightsManifest, lay_out
from tests.actors.fake_engine import FakeEngine, FakeOptions
from tests.actors.statuses import statuses
from tests.actors.test_dispatch_ray import check, options, requests, running

pytestmark = pytest.mark.ray

TENSORS, TOTAL = lay_out([("w", "bfloat16", (300, 100)), ("q", "int8", (200, 200))])


def chain(links: int) -> list[Held]:
    random, buffers = np.random.default_rng(0), [np.zeros(TOTAL, np.uint8)]
    for _ in range(links):
        buffers.append(buffers[-1].copy())
        buffers[-1][random.integers(0, 90_000, 200)] ^= 5
    return [Held(WeightsManifest(v, checksum(b), TENSORS, TOTAL), b) for v, b in enumerate(buffers)]


def delta(old: Held, new: Held, base_version: int | None = None) -> Delta:
    """`base_version`: which it claims to be from."""
    found = encode(old, new, limit_bytes=TOTAL)
    assert found is not None
    assert found.size < 2_000
    base = old.manifest.version if base_version is None else base_version
    return Delta(base, new.manifest.version, ray.put(found), found.size)


def test_workers_hold_what_deltas_make_and_one_that_does_not_fit_costs_a_whole_copy() -> None:
    links = chain(5)
    with running(options(2)) as (dispatcher, events):

        def publish(version: int, deltas: Deltas | None) -> int:
            new = links[version]
            dispatcher.set_weights(new.manifest, ray.put(new.buffer), deltas)
            held = {(s.weights_version, s.weights_checksum) for s in statuses(dispatcher).values()}
            assert held == {(version, new.manifest.checksum)}
            return dispatcher.by_delta

        assert publish(0, Deltas("")) == 0  # nothing to compare with: whole, and kept
        assert publish(1, Deltas("", (delta(links[0], links[1]),))) == 2
        assert publish(2, Deltas("", (delta(links[1], links[2]),))) == 2
        assert events == []
        stale = Deltas("", (delta(links[0], links[3], 2),))  # says that it is from 2
        assert publish(3, stale) == 0
        refused = [message for kind, message in events if kind == "weights_delta_refused"]
        assert len(refused) == 2
        assert "the delta is from version 0, held is version 2; it took all of version 3" in refused[0]
        assert publish(4, Deltas("", (Delta(3, 4, ray.put(np.zeros(9, np.uint8)), 9),))) == 0
        assert "has no header" in events[-1][1]
        assert publish(5, Deltas("", (delta(links[4], links[5]),))) == 2
        done: list[Rollout] = []
        dispatcher.run(asked := requests(8), done.append)
        check(done, asked)


def test_who_joins_late_gets_what_its_node_lacks_and_the_learners_node_gets_them_whole() -> None:
    links = chain(3)
    with running(options(1)) as (dispatcher, events):
        publish = [(link.manifest, ray.put(link.buffer)) for link in links]
        dispatcher.set_weights(*publish[0], Deltas(""))
        dispatcher.join("late")
        dispatcher.wait(lambda: all(now.state is SeatState.READY for now in dispatcher.workers().values()))
        assert dispatcher.by_delta == 0
        dispatcher.join("later")  # while the others get what changed
        dispatcher.set_weights(*publish[1], Deltas("", (delta(links[0], links[1]),)))
        dispatcher.wait(lambda: all(now.state is SeatState.READY for now in dispatcher.workers().values()))
        assert dispatcher.by_delta == 3  # its node has version 0, and the delta is fewer bytes than version 1
        here = ray.get_runtime_context().get_node_id()
        assert dispatcher.elsewhere("another node")
        assert not dispatcher.elsewhere(here)
        dispatcher.set_weights(*publish[2], Deltas(here, (delta(links[1], links[2]),)))
        assert dispatcher.by_delta == 0
        assert {status.weights_checksum for status in statuses(dispatcher).values()} == {links[2].manifest.checksum}
        assert [kind for kind, _ in events if kind == "weights_delta_refused"] == []


def test_a_chain_is_taken_from_where_a_worker_stands() -> None:
    """An engine that is restarted while its worker goes on, a worker that is replaced, and a chain that does not reach
    back to what they have."""
    links = chain(6)
    with running(options(2)) as (dispatcher, events):
        seats = dispatcher._seats.by_name
        deltas = [delta(old, new) for old, new in pairwise(links)]

        def publish(version: int, first: int) -> int:
            new = links[version]
            dispatcher.set_weights(new.manifest, ray.put(new.buffer), Deltas("", tuple(deltas[first:version])))
            return dispatcher.by_delta

        def lose(alive: bool) -> None:
            dispatcher._workers.lose(seats[worker_name(0)], "by the test", alive=alive)
            dispatcher.wait(lambda: all(now.state is SeatState.READY for now in dispatcher.workers().values()))
            held = {(s.weights_version, s.weights_checksum) for s in statuses(dispatcher).values()}
            assert held == {(dispatcher._workers.loading.version, links[len(done)].manifest.checksum)}

        done: list[int] = []  # versions after the first
        assert publish(0, 0) == 0
        for version in (1, 2, 3):
            done.append(publish(version, 0))
        assert done == [2, 2, 2]
        lose(alive=True)  # its worker still has version 3, and gives it to the new engine
        assert dispatcher.by_delta == 3
        lose(alive=False)  # the new worker has nothing; its node has version 0
        assert dispatcher.by_delta == 4
        done.append(publish(4, 1))  # the chain begins at version 1
        assert done[-1] == 2
        lose(alive=False)
        assert dispatcher.by_delta == 2, "it got everything, which is the node's new base"
        done.append(publish(5, 4))
        lose(alive=False)
        assert dispatcher.by_delta == 3
        assert [kind for kind, _ in events if kind == "weights_delta_refused"] == []


LOST = ObjectLostError("ff" * 28, "", "")


class There:
    """In place of a reference: a value, or the loss of it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, object]:
        if isinstance(self._value, Exception):
            raise self._value
        yield
        return self._value


@pytest.mark.asyncio
async def test_a_delta_that_is_lost_with_its_maker_costs_a_whole_copy() -> None:
    old, new, last = chain(2)
    w = cast(Any, RolloutWorker("w", partial(FakeEngine, FakeOptions())))
    await w.restart_engine()
    try:
        first = await w.update_weights(old.manifest, [There(old.buffer)], [])
        assert (first.version, first.way, first.instead) == (0, "store", "")
        second = await w.update_weights(new.manifest, [There(new.buffer)], [There(LOST)])
        assert (second.version, second.checksum, second.way) == (1, new.manifest.checksum, "store")
        assert "ffff" in second.instead
        change = encode(new, last, limit_bytes=TOTAL)
        third = await w.update_weights(last.manifest, [There(LOST)], [There(change)])  # the whole is not even fetched
        again = await w.update_weights(last.manifest, [There(LOST)], [])  # nor is it if it is there
        assert replace(again, seconds=0) == replace(third, seconds=0)
        assert (third.version, third.checksum, third.way) == (2, last.manifest.checksum, "delta")
    finally:
        await w.shutdown()
