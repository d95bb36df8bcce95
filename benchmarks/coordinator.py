"""The coordinator under load: `python -m benchmarks.coordinator [--only round_trip preemption ...]`.

Owns `results/coordinator.json` and its sections (`python -m tests.coordinator.fuzz` tests random sequences of events
and simulated clusters):

  round_trip   256 real connections from another process. A session of 16 (the default limit), or of all, starts and
               stops all the while; and a session of all of 1,024. From a worker's message to the receipt of its
               acknowledgement, including the answers of all members. Target: p99 < 10 ms
  preemption   from the end of the rollout until the last of 256, or 1,000, workers is recorded as IDLE again, each
               over its own connection. Targets: 100 and 300 ms. Trainers here stop at once; in a run the rest of a
               micro-step is added
  throughput   events per second of the machine alone, 1,000 and 5,000 workers

Both ends of all connections share this machine's cores, so a figure here is an upper bound of the coordinator's part.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import RESULTS, command, load, machine, quantiles_ms, save
from benchmarks.tools.coordinator_swarm import Swarm
from config.coordinator import CoordinatorOptions
from contracts.coordinator import (
    Busy,
    Changed,
    Event,
    Heartbeat,
    Idle,
    Notice,
    Register,
    RolloutComplete,
    RolloutStarted,
    Started,
    State,
    Stopped,
    Train,
)
from coordinator.machine import Machine
from coordinator.roster import Phase
from coordinator.transport.server import CoordinatorServer

SECTIONS = ("round_trip", "preemption", "throughput")
CONNECTED = CoordinatorOptions(max_members=1024, heartbeat_s=1.0, lease_s=30, start_deadline_s=30, stop_deadline_s=5)
ROUND_TRIP_TARGET_MS = 10.0
PREEMPTION_TARGETS_MS = {256: 100.0, 1000: 300.0}


class Watched:
    """A coordinator whose number of TRAINING workers is counted, on a thread of its own."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self.training = 0
        self.all_free_at_s = 0.0
        self.free = threading.Event()
        self.server = CoordinatorServer(Machine(options, term=1), "tcp://127.0.0.1:*", watch=self._watch)

    def _watch(self, notice: Notice) -> None:
        if isinstance(notice, Changed):
            self.training += (notice.after == State.TRAINING) - (notice.before == State.TRAINING)
            if self.training == 0:
                self.all_free_at_s = time.monotonic()
                self.free.set()

    def count(self, state: State, phase: Phase | None = None) -> int:
        with self.server.hub() as (hub, _):
            return sum(w.state is state and w.phase is phase for w in hub.machine.roster)

    def until(self, holds: Callable[[], bool], patience_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + patience_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {patience_s} s; messages: {self.server.counts()}")
            time.sleep(0.02)

    def train_and_stop(self, step: int, members: int, train_s: float) -> float:
        """Start a session of `members` workers, stop it after `train_s`, and return the seconds that stopping took."""
        self.server.control(RolloutStarted(step))
        self.until(lambda: self.count(State.TRAINING, Phase.RUNNING) == members)
        time.sleep(train_s)
        self.free.clear()
        start_s = time.monotonic()
        self.server.control(RolloutComplete(step))
        if not self.free.wait(60):
            raise TimeoutError(f"{self.training} workers still train after 60 s")
        return self.all_free_at_s - start_s


@contextmanager
def connected(workers: int, members: int = 1024) -> Iterator[tuple[Watched, Swarm]]:
    """Yield a coordinator and `workers` idle workers of one group, of which at most `members` train."""
    options = CONNECTED.model_copy(update={"max_members": members})
    watched = Watched(options)
    try:
        with Swarm(watched.server.endpoint, workers, options) as swarm:
            watched.until(lambda: watched.count(State.BUSY) == workers)
            swarm.idle()
            watched.until(lambda: watched.count(State.IDLE) == workers)
            yield watched, swarm
    finally:
        watched.server.close()


def round_trip(members: int, seconds: float, workers: int = 256) -> dict[str, Any]:
    with connected(workers, members) as (watched, swarm):
        swarm.round_trips()
        sessions, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            sessions += 1
            watched.train_and_stop(sessions, members, train_s=0.3)
            time.sleep(0.2)
        found = swarm.round_trips()
        counts = dict(watched.server.counts())
    every = quantiles_ms([taken_s for values in found.values() for taken_s in values])
    return {
        "workers": workers,
        "members": members,
        "sessions": sessions,
        **every,
        "target_ms": ROUND_TRIP_TARGET_MS,
        "within_target": every["p99_ms"] < ROUND_TRIP_TARGET_MS,
        "by_message": {kind: quantiles_ms(values) for kind, values in sorted(found.items())},
        "counts": counts,
    }


def preemption(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for workers, target_ms in PREEMPTION_TARGETS_MS.items():
        with connected(workers) as (watched, _):
            taken = [watched.train_and_stop(step, workers, train_s=0.1) for step in range(rounds)]
        rows.append(
            {
                "workers": workers,
                **quantiles_ms(taken),
                "target_ms": target_ms,
                "within_target": max(taken) * 1e3 < target_ms,
            }
        )
    return rows


def throughput() -> list[dict[str, Any]]:
    return [
        {"workers": workers, "groups_of": of} | machine_alone(workers, of)
        for workers in (1000, 5000)
        for of in (16, 1000)
    ]


def machine_alone(workers: int, of: int) -> dict[str, Any]:
    """Return events per second: heartbeats, and whole cycles in which every group trains as far as it may."""
    machine = Machine(CONNECTED, term=1)
    names = [f"w{i:04}" for i in range(workers)]
    for i, name in enumerate(names):
        machine.step(Register(name, 1, f"n{i // 8}", f"g{i // of}", State.BUSY), 0.0)
    beats = [Heartbeat(name, 1, State.BUSY, running=3) for name in names]
    rounds = math.ceil(50_000 / workers)
    start_s = time.perf_counter()
    for _ in range(rounds):
        for beat in beats:
            machine.step(beat, 0.5)
    beats_per_s = rounds * workers / (time.perf_counter() - start_s)
    events, cycles, start_s = 0, 3, time.perf_counter()
    for cycle in range(cycles):
        events += run_cycle(machine, names, cycle)
    elapsed_s = time.perf_counter() - start_s
    return {
        "heartbeats_per_s": round(beats_per_s),
        "cycle_events_per_s": round(events / elapsed_s),
        "events_per_cycle": events // cycles,
        "cycle_ms": round(elapsed_s / cycles * 1e3, 1),
    }


def run_cycle(machine: Machine, names: list[str], step: int) -> int:
    """Let all workers become idle, train, stop and be busy again. Returns the number of events."""
    pending: list[Event] = [RolloutStarted(step), *(Idle(name, 1) for name in names)]
    events = 0
    while pending:
        answers: list[Event] = []
        for event in pending:
            for output in machine.step(event, 0.5):
                if isinstance(output, Train):
                    answers.append(Started(output.worker, 1, output.session, output.epoch, "h:1"))
        events += len(pending)
        pending = answers
    ending: list[Event] = [RolloutComplete(step)]
    ending += [Stopped(worker.name, 1, worker.session) for worker in machine.roster if worker.session is not None]
    ending += [Busy(name, 1, 3) for name in names]
    for event in ending:
        machine.step(event, 0.5)
    return events + len(ending)


def main(
    *,
    only: Annotated[Sequence[str], "the others keep their record", SECTIONS] = SECTIONS,
    seconds: Annotated[float, "of each round-trip measurement"] = 15.0,
    rounds: Annotated[int, "of each preemption measurement"] = 20,
    out: Path = RESULTS / "coordinator.json",
) -> None:
    measure: dict[str, Callable[[], Any]] = {
        "round_trip": lambda: [round_trip(16, seconds), round_trip(256, seconds), round_trip(1024, seconds, 1024)],
        "preemption": lambda: preemption(rounds),
        "throughput": throughput,
    }
    record = load(out) if out.exists() else {}
    for section in only:
        record[section] = {"machine": machine(), "found": measure[section]()}
        print(f"{section}: {json.dumps(record[section]['found'], indent=1)}", flush=True)
        save(out, record)


if __name__ == "__main__":
    command(main)
