"""What the loss of a worker uses up, and who waits: the dispatcher with fakes, without Ray and without a clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from actors import loop
from actors.incarnation import Leaving
from benchmarks.alone import DispatcherAlone
from benchmarks.driver_fakes import Ref, Remote, loaded
from config.rollout import EngineOptions, RolloutOptions, WorkerCount
from contracts.engine import Sleep
from contracts.rollout import Slept
from launch.dispatch import SeatState
from launch.dispatch import dispatcher as dispatcher_module
from launch.dispatch.seat import node_lost
from launch.errors import PacelineError
from models.manifest import WeightsManifest
from tests.actors.test_dispatch_fleet import Fleet, Worker


class Script(Fleet):
    """A fleet in which nothing happens of itself; `starts`: what a worker's start answers, by number; default: it is
    up. None: it does not answer."""

    def __init__(self, starts: dict[int, Any] | None = None) -> None:
        super().__init__(0, 0.0)
        self.starts, self.started = starts or {}, 0
        self.kind: type[Starter] = Starter
        self.then: list[Callable[[], None]] = []  # done one by one, when nothing else is left

    def spawn(self, name: str) -> Any:
        self.workers.append(worker := self.kind(name, self))
        return worker

    def get(self, timeout: float) -> Any:
        while not self._queue:
            if self.todo:
                self.todo.popleft()()
            elif self.then:
                self.then.pop(0)()
            else:
                self.now_s += timeout  # nothing comes
                raise Empty
        return self._queue.pop(0)

    def get_nowait(self) -> Any:
        while self.todo:
            self.todo.popleft()()
        return super().get_nowait()


class Starter(Worker):
    def _restart(self) -> Ref:
        assert isinstance(self.fleet, Script)
        number, self.fleet.started = self.fleet.started, self.fleet.started + 1
        up = super()._restart()
        value = self.fleet.starts.get(number, up.value)
        return Ref(value, self.fleet.todo) if value is not None else Silent(None, self.fleet.todo)


class Silent(Ref):
    def _on_completed(self, call: Callable[[Any], None]) -> None: ...


@contextmanager
def dispatching(script: Script, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Iterator[DispatcherAlone]:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "SimpleQueue", lambda: script)
        patch.setattr(ray, "kill", lambda handle, no_restart: setattr(handle, "dead", True))
        patch.setattr(dispatcher_module, "node_lost", lambda error, node_id: "node" in str(error))
        patch.setattr(ray, "get", lambda ref, timeout: getattr(ref, "value", ref))
        patch.setattr(ray, "wait", lambda refs, **kwargs: (list(refs), []))
        options = RolloutOptions(
            workers=WorkerCount.fixed(2), engine=EngineOptions(max_running=4), max_worker_restarts=2
        )
        dispatcher = DispatcherAlone(
            script.spawn,
            options,
            start_timeout_s=10.0,
            clock=lambda: script.now_s,
            wall=lambda: script.now_s,
            **more,
        )
        yield dispatcher
        dispatcher.close()


def states(dispatcher: DispatcherAlone) -> dict[str, SeatState]:
    return {name: now.state for name, now in dispatcher.workers().items()}


def passes(dispatcher: DispatcherAlone, script: Script, *, until_s: float) -> None:
    while script.now_s < until_s:
        dispatcher.settle()
        script.now_s += 1


READY = {"rollout-0": SeatState.READY, "rollout-1": SeatState.READY}


class NodeLostError(ActorDiedError):
    def __str__(self) -> str:
        return "its node has died"


def test_a_node_that_is_lost_while_the_run_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    script, events = Script({0: NodeLostError()}), list[str]()
    with dispatching(script, monkeypatch, on_event=lambda kind, message: events.append(kind)) as dispatcher:
        dispatcher.start()
        assert states(dispatcher) == READY
    assert events == ["worker_lost", "worker_restarted"]


def test_a_lost_node_that_takes_a_replacement_with_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts it where the first one was, until it has found that the node is gone; and says of the first one only
    that it does not answer, which uses up a restart, until then."""
    script, events = Script({2: NodeLostError()}), list[str]()
    with dispatching(
        script, monkeypatch, on_event=lambda kind, message: events.append(f"{kind} {message}")
    ) as dispatcher:
        dispatcher.start()
        script.workers[0].end(dead=True)
        passes(dispatcher, script, until_s=5)
        assert states(dispatcher) == READY
        assert dispatcher._seats.by_name["rollout-0"].restarts == 0
    assert len(script.workers) == 4
    assert [event.split(":")[0] for event in events] == ["worker_lost rollout-0", "worker_restarted rollout-0"]
    assert events[-1].endswith("(restart 1)")


def test_a_worker_that_is_told_to_end_while_others_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({0: None})
    with dispatching(script, monkeypatch) as dispatcher:

        def told() -> None:
            [worker] = [worker for worker in script.workers if worker.name == "rollout-1"]
            assert worker.expected is not None
            say, worker.expected = worker.expected, None
            say([Leaving("its node is shut down")])

        script.then = [told]
        with pytest.raises(PacelineError, match="rollout-0 did not start: starting took longer"):
            dispatcher.start()  # it is the other one's fault, which does not answer
        assert [worker.name for worker in script.workers] == ["rollout-0", "rollout-1", "rollout-1"]
        assert states(dispatcher)["rollout-1"] is SeatState.READY


def test_what_an_engine_says_while_the_run_starts_ends_it_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({1: ActorDiedError()})
    with dispatching(script, monkeypatch) as dispatcher:
        with pytest.raises(PacelineError, match="rollout-1 did not start") as raised:
            dispatcher.start()
        assert "cluster.start_timeout_s" in (raised.value.remedy or "")


@pytest.mark.parametrize("others", [True, False])
def test_a_worker_that_waits_for_room_uses_up_no_restart_while_another_is_up(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, room = Script(), [True]
    with dispatching(script, monkeypatch, placed=lambda name: room[0]) as dispatcher:
        dispatcher.start()
        room[0] = False
        script.starts = dict.fromkeys(range(2, 20))
        for worker in script.workers[: 1 if others else 2]:
            worker.end(dead=True)
        if not others:  # somebody must end the run
            with pytest.raises(PacelineError, match=r"cluster\.start_timeout_s"):
                passes(dispatcher, script, until_s=200)
            return
        passes(dispatcher, script, until_s=200)
        assert states(dispatcher)["rollout-0"] is SeatState.STARTING
        assert len(script.workers) == 3, "Ray starts the one that was asked for"
        room[0] = True  # there is a place, and its engine hangs: that is its own fault
        passes(dispatcher, script, until_s=300)
        assert states(dispatcher)["rollout-0"] is SeatState.DEAD


class Loads(Starter):
    """Loads whatever buffer is there."""

    asleep = False
    buffer: Any = None

    def __getattr__(self, method: str) -> Any:
        if method == "use_buffer":
            return Remote(self._use)
        return Remote(self._ask) if method == "ask" else super().__getattr__(method)

    def _use(self, buffer: Any) -> Ref:
        self.buffer = buffer
        return Ref(None, self.fleet.todo)

    def _ask(self, command: Any, memory: Any = None) -> Ref:
        if isinstance(command, Sleep):
            self.asleep = True
            return Ref(Slept(), self.fleet.todo)
        gone = RayTaskError("ask", "no buffer", ActorDiedError())
        return Ref(gone if memory == "gone" else loaded(command), self.fleet.todo)


def test_who_finds_the_weights_gone_waits_until_somebody_makes_another_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put off while others sample; asked again, so that a run whose others are lost too does not wait for ever."""
    script, asked, busy = Script(), list[bool](), [True]
    script.kind = Loads
    manifest = WeightsManifest(1, 0, (), 8)

    def gone() -> bool:
        asked.append(busy[0])
        if not busy[0]:
            dispatcher.renew_weights(manifest, cast(Any, "new"))
        return True

    with dispatching(script, monkeypatch, on_weights_gone=gone) as dispatcher:
        dispatcher.start()
        dispatcher.set_weights(manifest, cast(Any, "there"))
        dispatcher.renew_weights(manifest, cast(Any, "gone"))
        script.workers[0].end(dead=True)
        passes(dispatcher, script, until_s=1000)
        assert states(dispatcher) == {**READY, "rollout-0": SeatState.LOADING}
        assert dispatcher.sleep(1.0) == {}
        assert [worker.asleep for worker in script.workers] == [False, True, True], "it holds a KV cache as well"
        assert len(script.workers) == 3, "it is not late: there is nothing that it could load"
        busy[0] = False
        passes(dispatcher, script, until_s=1002)
        assert states(dispatcher) == READY
    assert asked.count(False) == 1


def test_a_worker_that_comes_up_where_none_may_be_leaves_before_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray moves the place of one that was lost; whoever counts the workers starts another one elsewhere."""
    script, refused, events = Script(), dict[str, str](), list[str]()
    with dispatching(
        script,
        monkeypatch,
        refused=refused,
        on_event=lambda kind, message: events.append(f"{kind} {message}"),
    ) as dispatcher:
        dispatcher.start()
        refused[""] = "it has another torch"  # the fakes' node
        script.workers[0].end(dead=True)
        passes(dispatcher, script, until_s=5)
        assert states(dispatcher) == {"rollout-1": SeatState.READY}, "who was there before is the fleet's to move"
    assert "worker_left rollout-0: it came up where it may not: it has another torch" in events[-1]


def test_a_loss_is_handled_while_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> Any:
        raise RuntimeError("no head")

    monkeypatch.setattr(ray, "nodes", nodes)
    assert not node_lost(ActorDiedError(), "a")
