"""A worker's spare time: the supervisor without Ray, a real coordinator, an engine and a trainer whose moves are known.

What is asserted holds however the threads interleave; `eventually` waits for what must come.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from actors import spot_host
from actors.incarnation import WorkerEvent
from actors.rollout_worker import RolloutWorker
from actors.spot_host import RecordingReport, SpotHost, SpotPlan
from config.coordinator import CoordinatorOptions
from contracts.coordinator import RolloutComplete, RolloutStarted
from contracts.engine import Command, Sleep, Submit, UpdateDrafter, UpdateWeights, Wake
from contracts.records import SequenceRecord
from contracts.rollout import Finished, Recorded
from contracts.spot import MicroStep, TrainedWeights, TrainFailed, TrainStopped
from coordinator.transport.server import CoordinatorServer
from tests.actors.fake_engine import FakeEngine, FakeOptions, make_request, response, weights
from tests.actors.fake_trainer import Script
from tests.coordinator.cluster import served, states
from tests.spot.support import only, record

pytestmark = pytest.mark.asyncio
OPTIONS = CoordinatorOptions(heartbeat_s=0.1, lease_s=1.5, stop_deadline_s=0.5, start_deadline_s=20, retry_after_s=0)
PATIENCE_S = 20.0


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


class Engine(FakeEngine):
    """Which writes down the order of what it is told, and refuses work while it sleeps."""

    def __init__(self, log: list[str]) -> None:
        log.append("engine")
        super().__init__(FakeOptions())
        self._log, self._asleep = log, False

    def send(self, command: Command, memory: NDArray[np.uint8] | None = None) -> None:
        if isinstance(command, Submit):
            assert not self._asleep, "requests reached an engine that has no memory"
        if isinstance(command, Submit | Sleep | Wake):
            self._asleep = isinstance(command, Sleep)
            self._log.append(type(command).__name__.lower())
        super().send(command, memory)


@dataclass
class Buffer:
    """A data buffer as a handle of an actor shows it; `fault` is what each call ends with."""

    records: list[SequenceRecord] = field(default_factory=list)
    fault: Exception | None = None
    calls: int = 0

    @property
    def add(self) -> Any:
        return SimpleNamespace(remote=self._add)

    @property
    def sample(self) -> Any:
        return SimpleNamespace(remote=self._sample)

    async def _add(self, refs: list[list[SequenceRecord]]) -> int:
        self._fail()
        self.records += [record for ref in refs for record in ref]
        return len(refs)

    async def _sample(self, tokens: int, version: int) -> list[SequenceRecord]:
        self._fail()
        return self.records[:2]

    def _fail(self) -> None:
        self.calls += 1
        if self.fault is not None:
            raise self.fault


@dataclass
class World:
    """One worker and all that it meets."""

    server: CoordinatorServer
    worker: RolloutWorker
    script: Script
    buffer: Buffer
    events: list[WorkerEvent] = field(default_factory=list)

    @property
    def state(self) -> str:
        return states(self.server).get("w", "")

    def rollout(self) -> None:
        self.server.control(RolloutStarted(1, True))

    async def work(self, request_id: int) -> None:
        """Serve one request; its tokens are those of an engine that nobody disturbs."""
        request = make_request(request_id)
        await self.worker.tell(Submit((request,)))
        await eventually(lambda: any(r.request_id == request_id for r in self.rollouts))
        [rollout] = [r for r in self.rollouts if r.request_id == request_id]
        assert rollout.tokens.tolist() == response(request)[0]

    @property
    def rollouts(self) -> list[Any]:
        return [event.rollout for event in only(self.events, Finished)]

    async def training(self, steps: int = 1) -> None:
        """Until it has done `steps` more micro-steps."""
        seen = len(only(self.events, MicroStep))
        await eventually(lambda: len(only(self.events, MicroStep)) >= seen + steps)

    async def _read(self) -> None:
        async for batch in self.worker.stream():
            self.events += batch


@asynccontextmanager
async def world(script: Script | None = None, *, stop_timeout_s: float = 10.0) -> AsyncIterator[World]:
    script, buffer = script or Script(), Buffer([record(0), record(1)])
    with served(OPTIONS) as server:
        plan = SpotPlan(
            factory=script.trainer,
            endpoint=server.endpoint,
            coordinator=OPTIONS,
            stop_timeout_s=stop_timeout_s,
        )
        worker = RolloutWorker("w", lambda: cast(Any, Engine(script.log)), plan)
        here = World(server, worker, script, buffer)
        await worker.restart_engine()
        await worker.start_trainer()
        await worker.use_buffer(buffer)
        reader = asyncio.create_task(here._read())
        try:
            yield here
        finally:
            await worker.shutdown()
            await reader


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objects are their own references, this node is n0; and no thread of these tests is left at their end."""
    context = SimpleNamespace(get_node_id=lambda: "n0")
    monkeypatch.setattr(spot_host, "ray", SimpleNamespace(put=lambda value: value, get_runtime_context=lambda: context))
    monkeypatch.setattr(spot_host, "_RETRY_S", (0.01, 0.02, 0.03))
    yield
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("w-") and "calls" not in thread.name
    ]


@pytest.mark.parametrize(
    ("endpoint", "host"), [("tcp://127.0.0.1:5000", "127.0.0.1"), ("tcp://10.0.0.7:5000", "10.0.0.9")]
)
async def test_others_reach_its_trainer_at_its_nodes_address_unless_all_are_on_one_machine(
    endpoint: str, host: str
) -> None:
    script = Script()
    plan = SpotPlan(factory=script.trainer, endpoint=endpoint, coordinator=OPTIONS, stop_timeout_s=10.0)

    async def nothing() -> None:
        pass

    spot = SpotHost("w", "10.0.0.9", 1, plan, pause=nothing, resume=nothing, emit=lambda event: None)
    await asyncio.sleep(0.05)
    assert script.hosts == [], "it takes a core for seconds"
    for _ in range(2):
        spot.start_trainer()
    await eventually(lambda: bool(script.hosts))
    assert script.hosts == [host]
    await spot.close()


async def test_it_stands_still_for_the_learner_until_there_are_new_weights() -> None:
    async with world() as w:
        w.rollout()
        await w.training()
        await w.worker.stop_training()
        assert w.script.log[-1] == "stopped"
        await eventually(lambda: bool(only(w.events, TrainStopped)))  # behind the last micro-step
        steps = len(only(w.events, MicroStep))
        await eventually(lambda: w.state == "TRAINING starting")  # the coordinator knows of nothing, and asks again
        await w.worker.stop_training()
        assert w.script.log[-1] == "stopped"
        assert len(only(w.events, MicroStep)) == steps
        manifest, buffer = weights(1)
        await w.worker.ask(UpdateWeights(manifest), buffer)
        w.server.control(RolloutComplete(1))
        await eventually(lambda: w.state == "IDLE")
        w.server.control(RolloutStarted(2, True))
        await w.training()


async def test_a_trainer_that_does_not_leave_for_the_learner_is_killed() -> None:
    async with world(Script(deaf=True), stop_timeout_s=0.1) as w:
        w.rollout()
        await w.training()
        await w.worker.stop_training()
        assert "kill" in w.script.log


async def test_out_of_work_it_trains_and_work_stops_it_first() -> None:
    async with world(Script(stop_s=0.2)) as w:
        await w.work(0)
        await eventually(lambda: w.state == "IDLE")
        w.script.log.clear()
        w.rollout()
        await w.training(3)
        await w.work(1)
        assert w.script.log[:6] == ["sleep", "start", "stop", "stopped", "wake", "submit"]
        [stopped] = only(w.events, TrainStopped)
        assert stopped.seconds == 0.2
        await w.training()  # and again, when that is done
        steps = [event.step for event in only(w.events, MicroStep)]
        assert steps == list(range(1, len(steps) + 1))
        versions = [event.manifest.version for event in only(w.events, TrainedWeights)]
        assert versions[:2] == [0, stopped.step]  # what it began with, and what it had when it was stopped
        assert w.script.made[0].fed[:2] == w.buffer.records


async def test_the_end_of_the_rollout_stops_it_and_the_engine_wakes_for_work_only() -> None:
    async with world() as w:
        w.rollout()
        await w.training()
        w.server.control(RolloutComplete(1))
        await eventually(lambda: w.state == "IDLE")
        assert w.script.log[-1] == "stopped"
        await w.work(0)
        assert w.script.log[-2:] == ["wake", "submit"]


async def test_without_a_trainer_it_is_never_idle() -> None:
    async with world(Script(fail_to_start="no memory left")) as w:
        w.rollout()
        for request_id in range(3):
            await w.work(request_id)
        await eventually(lambda: len(only(w.events, TrainFailed)) == 4)
        assert {event.reason for event in only(w.events, TrainFailed)} == {"no memory left"}
        await asyncio.sleep(0.2)
        await w.work(3)
        assert w.script.starts == 4  # one, and one more after each pause; then it is given up
        for _ in range(20):
            assert w.state in ("", "BUSY")
            await asyncio.sleep(0.01)
        assert "sleep" not in w.script.log


async def test_a_trainer_that_is_slow_to_come_makes_it_idle_when_it_is_there() -> None:
    gate = threading.Event()
    async with world(Script(gate=gate)) as w:
        w.rollout()
        await w.work(0)
        assert w.state != "IDLE"
        gate.set()
        await w.training()


async def test_a_deaf_trainer_is_killed_and_the_work_is_done() -> None:
    async with world(Script(deaf=True), stop_timeout_s=0.1) as w:
        w.rollout()
        await w.training()
        await w.work(0)
        assert w.script.log[:7] == ["engine", "sleep", "start", "stop", "kill", "wake", "submit"]
        assert only(w.events, TrainFailed) == [TrainFailed("did not stop within 0.1 s and was killed")]
        w.script.deaf = False
        await w.training()  # by another one
        assert [trainer.alive for trainer in w.script.made] == [False, True]


async def test_trainers_that_die_are_replaced_until_it_is_given_up() -> None:
    async with world() as w:
        w.rollout()
        for number in range(3):
            await w.training()
            if number == 2:
                w.buffer.records.clear()  # no more micro-steps
            w.script.made[-1].say(TrainFailed("out of memory"))
            await eventually(lambda n=number: len(w.script.made) == n + 2)  # micro-steps were done: it starts anew
        for number in range(3, 6):
            w.script.made[-1].say(TrainFailed("out of memory"))
            await eventually(lambda n=number: len(only(w.events, TrainFailed)) == n + 1)
            await eventually(lambda n=number: len(w.script.made) == min(n + 2, 6))
        await eventually(lambda: w.state != "IDLE" and not any(trainer.alive for trainer in w.script.made))
        await asyncio.sleep(0.2)
        assert w.script.starts == 6
        await w.work(0)


async def test_recorded_records_reach_the_buffer_and_the_driver_hears_of_them() -> None:
    async with world() as w:
        records = (record(7), record(8))
        assert w.worker._spot is not None
        w.worker._spot.recorded(Recorded(records, 0.25, 3))
        await eventually(lambda: w.buffer.records[2:] == list(records))
        report = RecordingReport(2, records[0].bytes + records[1].bytes, 0.25, 3)
        await eventually(lambda: only(w.events, RecordingReport) == [report])


async def test_a_dead_buffer_costs_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayActorError

    monkeypatch.setattr(spot_host, "_BUFFER_TIMEOUT_S", 0.2)
    async with world() as w:
        w.buffer.fault = RayActorError(None, "its node is gone")
        w.rollout()
        await eventually(lambda: w.buffer.calls >= 2 and w.state == "TRAINING running")
        assert w.worker._spot is not None
        w.worker._spot.recorded(Recorded((record(7),), 0.25, 0))
        await w.work(0)
        assert only(w.events, MicroStep) == only(w.events, TrainFailed) == []
        w.buffer.fault = None
        await w.training()


async def test_a_dead_coordinator_costs_training_only() -> None:
    async with world() as w:
        w.rollout()
        await w.training()
        w.server.close()
        await eventually(lambda: w.script.log[-1] == "stopped")  # of its own accord, within the lease
        for request_id in range(3):
            await w.work(request_id)
        assert only(w.events, TrainFailed) == []


async def test_new_weights_reach_the_trainer_and_the_one_after_it() -> None:
    gate, hold = threading.Event(), threading.Event()
    async with world(Script(gate=gate, hold=hold)) as w:
        for version in (3, 4, 5):
            manifest, buffer = weights(version)
            await w.worker.ask(UpdateWeights(manifest), buffer)
            if version == 3:  # came while it was starting
                gate.set()
                await eventually(lambda: bool(w.script.made) and w.script.made[0].targets == [3])
            elif version == 4:  # came while it was told of version 3
                hold.set()
                await eventually(lambda: w.script.made[0].targets == [3, 4])
        await eventually(lambda: w.script.made[0].targets == [3, 4, 5])
        w.script.made[0].say(TrainFailed("killed"))
        await eventually(lambda: len(w.script.made) == 2 and w.script.made[1].targets == [5])


async def test_a_stop_of_a_session_before_does_not_stop_this_one() -> None:
    """A trainer may stop by itself just when it is told to: it then says so twice."""
    async with world() as w:
        w.rollout()
        await w.training()
        w.script.made[0].say(TrainStopped(0, 1, 0.0, "the other members are gone"))
        await w.training(3)
        await w.work(0)
        assert w.script.log.index("stopped", w.script.log.index("stop")) < w.script.log.index("wake")


async def test_an_engine_that_starts_again_finds_no_trainer_in_its_memory() -> None:
    async with world() as w:
        w.rollout()
        await w.training()
        await w.worker.restart_engine()
        assert w.script.log[-3:] == ["stop", "stopped", "engine"]
        again = asyncio.create_task(w._read())
        await w.training()
        assert w.script.log[-2:] == ["sleep", "start"]
        await w.work(0)
        await w.worker.shutdown()
        await again


async def test_close_leaves_nothing_behind() -> None:
    gate = threading.Event()
    async with world(Script(gate=gate)) as w:
        await eventually(lambda: w.script.starts == 1)
    gate.set()  # it comes when the worker is closed, and is ended
    await eventually(lambda: bool(w.script.made) and not w.script.made[0].alive)
    async with world() as w:
        w.rollout()
        await w.training()
        await w.worker.shutdown()
        assert not w.script.made[0].alive
        await eventually(lambda: w.state == "")  # it has said goodbye


async def test_new_drafter_weights_reach_the_engine_and_the_trainer() -> None:
    async with world() as w:
        await eventually(lambda: bool(only(w.events, TrainedWeights)))
        assert only(w.events, TrainedWeights)[0].payload is None, "the bytes do not go up with the event"
        manifest, payload = await w.worker.drafter_weights(0)
        assert (manifest.version, payload.tolist()) == (0, [0] * 4)
        manifest, payload = weights(7)
        loaded = await w.worker.ask(UpdateDrafter("eagle", manifest), payload)
        assert (loaded.name, loaded.version) == ("eagle", 7)
        assert w.script.made[0].loaded == [7]


async def test_weights_that_an_engine_got_in_pieces_reach_the_trainer_from_the_store() -> None:
    async with world() as w:
        await eventually(lambda: bool(w.script.made))
        await w.worker.target_weights(*weights(7))
        await eventually(lambda: w.script.made[0].targets[-1] == 7)


async def test_an_engine_that_sleeps_for_the_learner_wakes_when_work_comes_whatever_was_trained_meanwhile() -> None:
    async with world() as w:
        assert not (await w.worker.ask(Sleep())).refusal
        w.rollout()
        await w.training()  # which pauses it again
        await w.work(1)  # fails if requests reach it while it sleeps
        assert not (await w.worker.ask(Sleep())).refusal
        await w.worker.ask(UpdateWeights(weights(2)[0]), weights(2)[1])
        await w.work(2)
