"""The coordinator under load: `python -m benchmarks.coordinator [--only round_trip preemption ...]`.

Owns `results/coordinator.json` and its sections:

  round_trip   256 real connections from another process; a session of 16 (the default limit), or of all, starts and
               stops all the while. From a worker saying something to the acknowledgement in its hands, the bursts in
               which all members answer at once included. Target: p99 < 10 ms
  preemption   from the end of the rollout to the last of 256, or 1,000, workers on the books as IDLE again, each told
               over a connection of its own. Targets: 100 and 300 ms. Trainers here stop at once: in a run the rest of a
               micro-step comes on top
  throughput   events per second of the machine alone, 1,000 and 5,000 workers
  sequences    random event sequences for the machine, invariants checked after every event
  worlds       random simulated clusters (lost, late, doubled, overtaking messages, crashes), truth checked against the
               books; `--worlds 100000` for a long night

Both ends of all connections share this machine's cores, so a figure here is an upper bound of the coordinator's part.
"""

import argparse
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe_machine, is_busy
from benchmarks.tools.coordinator_events import random_sequence
from benchmarks.tools.coordinator_swarm import Swarm
from benchmarks.tools.coordinator_worlds import random_world
from coordinator.events import (
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
from coordinator.options import CoordinatorOptions
from coordinator.roster import Phase
from coordinator.transport.server import CoordinatorServer

ROOT = Path(__file__).parents[1]
CONNECTED = CoordinatorOptions(max_members=1024, heartbeat_s=1.0, lease_s=30, start_deadline_s=30, stop_deadline_s=5)
ROUND_TRIP_TARGET_MS = 10.0
PREEMPTION_TARGETS_MS = {256: 100.0, 1000: 300.0}
EVENTS = 30  # of one random sequence
CHUNK = 250  # sequences or worlds of one task of a process


class Watched:
    """A coordinator whose TRAINING workers are counted as they come and go, on its own thread."""

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
        return self.server.call(
            lambda hub, now_s: sum(w.state is state and w.phase is phase for w in hub.machine.roster)
        )

    def until(self, holds: Callable[[], bool], patience_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + patience_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {patience_s} s; messages: {self.server.counts()}")
            time.sleep(0.02)

    def train_and_stop(self, step: int, members: int, train_s: float) -> float:
        """A session of so many workers begins, lasts `train_s` and is stopped. Returns how long stopping took, in s."""
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
    """A coordinator and so many idle workers of one group, at most `members` of which train."""
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


def round_trip(members: int, workers: int = 256, seconds: float = 15.0) -> dict[str, Any]:
    with connected(workers, members) as (watched, swarm):
        swarm.round_trips()
        sessions, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            sessions += 1
            watched.train_and_stop(sessions, members, train_s=0.3)
            time.sleep(0.2)
        found = swarm.round_trips()
        counts = dict(watched.server.counts())
    every = [taken_s for values in found.values() for taken_s in values]
    p99_ms = quantile_ms(every, 0.99)
    return {
        "workers": workers,
        "members": members,
        "sessions": sessions,
        "messages": len(every),
        "p50_ms": quantile_ms(every, 0.5),
        "p99_ms": p99_ms,
        "target_ms": ROUND_TRIP_TARGET_MS,
        "within_target": p99_ms < ROUND_TRIP_TARGET_MS,
        "by_message": {
            kind: {"messages": len(v), "p50_ms": quantile_ms(v, 0.5), "p99_ms": quantile_ms(v, 0.99)}
            for kind, v in sorted(found.items())
        },
        "counts": counts,
    }


def preemption(rounds: int = 20) -> list[dict[str, Any]]:
    rows = []
    for workers, target_ms in PREEMPTION_TARGETS_MS.items():
        with connected(workers) as (watched, _):
            taken = [watched.train_and_stop(step, workers, train_s=0.1) for step in range(rounds)]
        rows.append(
            {
                "workers": workers,
                "rounds": rounds,
                "median_ms": round(median(taken) * 1e3, 2),
                "worst_ms": round(max(taken) * 1e3, 2),
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
    """Events per second: heartbeats, and whole cycles in which every group trains as far as it may."""
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
    """All become idle, train, stop and are busy again. Returns the number of events."""
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


def sequences(count: int) -> dict[str, Any]:
    total = in_processes(run_sequences, count)
    return {"sequences": count, "events": total["events"], "violations": total["violations"]}


def run_sequences(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            random_sequence(random.Random(seed), EVENTS)
        except AssertionError as error:
            total["violations"] += 1
            print(f"sequence {seed}: {error}", flush=True)
        total["events"] += EVENTS
    return total


def worlds(count: int) -> dict[str, Any]:
    total = in_processes(run_worlds, count)
    virtual_s, events, violations = (total.pop(name, 0) for name in ("virtual_s", "events", "violations"))
    return {
        "worlds": count,
        "events": events,
        "virtual_hours": round(virtual_s / 3600, 1),
        "violations": violations,
        "happened": dict(sorted(total.items())),
    }


def run_worlds(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = random_world(seed).run()
        except AssertionError as error:
            total["violations"] += 1
            print(f"world {seed}: {error}", flush=True)
            continue
        total += outcome.happened + outcome.counts
        total["events"] += outcome.events
        total["virtual_s"] += round(outcome.virtual_s)
    return total


def in_processes(run: Callable[[range], Counter[str]], count: int) -> Counter[str]:
    chunks: Iterable[range] = (range(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(run, chunks), Counter())


def quantile_ms(values: list[float], q: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(q * len(values)))] * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("round_trip", "preemption", "throughput", "sequences", "worlds")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="the others keep their record")
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "coordinator.json")
    args = parser.parse_args()
    if is_busy():
        print("warning: this machine is busy; timings mean little", flush=True)
    measure: dict[str, Callable[[], Any]] = {
        "round_trip": lambda: [round_trip(16), round_trip(256)],
        "preemption": preemption,
        "throughput": throughput,
        "sequences": lambda: sequences(args.sequences),
        "worlds": lambda: worlds(args.worlds),
    }
    record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for section in args.only:
        start_s = time.perf_counter()
        found = measure[section]()
        taken_s = round(time.perf_counter() - start_s, 1)
        record[section] = {"machine": describe_machine(("pyzmq", "msgspec")), "taken_s": taken_s, "found": found}
        print(f"{section} ({taken_s} s): {json.dumps(found, indent=1)}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
