"""What must not wait happens wherever the dispatcher waits, and may change its workers there: fakes, as in the tests of
losses."""

from queue import Empty
from typing import Any, cast

import numpy as np
import pytest
import ray

from actors.loop import SLICE_S, EventLoop
from benchmarks.alone import DispatcherAlone
from config.rollout import EngineOptions, RolloutOptions, WorkerCount
from contracts.handoff import Offer, Sent
from contracts.rollout import Rollout
from launch.dispatch import SeatState
from models.manifest import WeightsManifest
from tests.actors.test_dispatch_fleet import SLOTS, Fleet, instead_of_ray, some_requests
from tests.actors.test_dispatch_losses import READY, Loads, Script, dispatching, states

MANIFEST = WeightsManifest(1, 0, (), 8)


class Sending:
    """The learner's end, which lets workers come and go while it begins and while it ends."""

    def __init__(self, dispatcher: DispatcherAlone, script: Script) -> None:
        self.dispatcher, self.script = dispatcher, script
        script.workers[0].end(dead=True)  # it is offered nothing, and comes up before the others have their offers
        self._waits()

    def _waits(self) -> None:
        for _ in range(8):
            self.dispatcher.settle()
            self.script.now_s += SLICE_S

    def offer(self, receiver: int) -> Offer:
        assert receiver == 1
        return Offer(store="", name="", version=2, tensors=(), total_bytes=0, receiver=receiver, limit_s=60.0)

    def finish(self) -> Any:
        self.dispatcher.join("rollout-2")
        self._waits()
        assert states(self.dispatcher)["rollout-2"] is SeatState.LOADING, "it samples with no older weights"
        sent = Sent(version=2, checksum=0, total_bytes=0, seconds=0.0, ways=())
        return sent, WeightsManifest(2, 0, (), 8), "there"


def test_who_waits_for_weights_hears_what_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is told to leave while all load weights: it is gone when they have them."""
    script, heard = Script(), list[int]()
    script.kind = Loads
    with dispatching(script, monkeypatch) as dispatcher:
        dispatcher.start()

        def meanwhile() -> None:
            if not heard:
                dispatcher.leave("rollout-0", "its node goes")
            heard.append(len(heard))

        dispatcher.meanwhile = meanwhile
        assert dispatcher.set_weights(MANIFEST, cast(Any, "there")) == 1
        passes(dispatcher, script)
        assert states(dispatcher) == {"rollout-1": SeatState.READY}


def passes(dispatcher: DispatcherAlone, script: Script) -> None:
    for _ in range(5):
        dispatcher.settle()
        script.now_s += 1


def test_workers_are_lost_and_join_while_the_learner_hands_over_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.kind = Loads
    with dispatching(script, monkeypatch) as dispatcher:
        dispatcher.start()
        dispatcher.set_weights(MANIFEST, cast(Any, "there"))
        sending: Any = Sending
        dispatcher.hand_over(lambda receivers: sending(dispatcher, script))
        assert states(dispatcher) == {**READY, "rollout-2": SeatState.READY}
        assert dispatcher._workers.loading.version == 2


def test_the_waits_for_another_buffer_may_handle_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made within the handling of what has arrived: the rest is handled there, once."""
    script, renewed = Script(), list[str]()
    script.kind = Loads

    def gone() -> bool:
        if not renewed:
            renewed.append("new")
            script.workers[1].end(dead=True)  # another one is lost meanwhile
            dispatcher.settle()
            dispatcher.renew_weights(MANIFEST, cast(Any, "new"))
        return True

    with dispatching(script, monkeypatch, on_weights_gone=gone) as dispatcher:
        dispatcher.start()
        dispatcher.set_weights(MANIFEST, cast(Any, "there"))
        dispatcher.renew_weights(MANIFEST, cast(Any, "gone"))
        script.workers[0].end(dead=True)
        passes(dispatcher, script)
        assert states(dispatcher) == READY
    assert [worker.name for worker in script.workers] == ["rollout-0", "rollout-1", "rollout-0", "rollout-1"]


class Answer:
    """A reference whose value is there after so many seconds."""

    def __init__(self, there_s: float) -> None:
        self.there_s = there_s

    def _on_completed(self, call: Any) -> None: ...


def test_a_wait_for_answers_is_cut_into_turns_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looked = [0.0], list[float]()
    answers = {"a": Answer(0.1), "b": Answer(0.6), "never": Answer(99.0)}

    class Nothing:
        """Comes."""

        def get(self, timeout: float) -> Any:
            assert timeout <= SLICE_S
            now_s[0] += timeout
            raise Empty

        def get_nowait(self) -> Any:
            raise Empty

    def wait(refs: list[Answer], *, num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        assert (num_returns, timeout) == (len(refs), 0)
        return [r for r in refs if r.there_s <= now_s[0]], [r for r in refs if r.there_s > now_s[0]]

    monkeypatch.setattr("actors.loop.SimpleQueue", Nothing)
    monkeypatch.setattr(ray, "wait", wait)
    loop = EventLoop(lambda: now_s[0])
    loop.react_with(lambda event: looked.append(now_s[0]))
    found: Any = loop.answers(cast(Any, list(answers.values())), 1.1)
    assert found == ([answers["a"], answers["b"]], [answers["never"]])
    assert now_s == [1.1]
    assert looked == [0.25, 0.5, 0.75, 1.0, 1.1]
    assert loop.answers([], 1.0) == ([], [])


def test_each_worker_that_comes_up_is_given_its_nodes_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have joined after the worker was asked for."""
    script = Script()
    script.kind = Loads
    with dispatching(script, monkeypatch) as dispatcher:
        dispatcher.buffer_of = lambda node_id: f"buffer of {node_id!r}"
        dispatcher.start()
        script.workers[0].end(dead=True)
        passes(dispatcher, script)
        dispatcher.join("rollout-2")
        passes(dispatcher, script)
        assert [cast(Loads, worker).buffer for worker in script.workers] == ["buffer of ''"] * 4


def test_a_rollout_goes_on_while_its_caller_waits_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a learner that is made again, which takes longer than what workers have in hand."""
    fleet, found = Fleet(0, 0.0), list[Rollout]()
    instead_of_ray(fleet, monkeypatch)
    options = RolloutOptions(workers=WorkerCount.fixed(2), engine=EngineOptions(max_running=SLOTS))
    dispatcher = DispatcherAlone(fleet.spawn, options, clock=lambda: fleet.now_s, wall=lambda: fleet.now_s)
    dispatcher.start()
    in_one_wait: list[int] = []

    def waits() -> None:
        if in_one_wait:
            return
        in_one_wait.append(0)
        for _ in range(5000):
            fleet._happen()
            dispatcher.settle()
        in_one_wait[0] = len(found)

    dispatcher.meanwhile = waits
    dispatcher.run(some_requests(40, np.random.default_rng(0)), found.append)
    assert in_one_wait == [40]
