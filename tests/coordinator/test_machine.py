"""The machine alone: golden transcripts, its table, and its invariants whatever comes."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.coordinator import (
    Busy,
    Event,
    Heartbeat,
    Idle,
    Leave,
    Register,
    RolloutStarted,
    Started,
    State,
    Stopped,
    Train,
    TrainerFailed,
)
from coordinator.machine import IllegalTransitionError, Machine, UnknownTargetError
from coordinator.table import TABLE, Edge
from tests.coordinator.random_events import OPTIONS, place, random_event, random_sequence, snapshot
from tests.coordinator.transcripts import replay

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_transcript(path: Path) -> None:
    """To write them anew: python -m tests.coordinator.transcripts, and read every line of the difference."""
    text = path.read_text(encoding="utf-8")
    assert replay(text) == text


@pytest.mark.parametrize("block", range(4))
def test_invariants_hold_whatever_comes(block: int) -> None:
    """5,000 random sequences here, 100,000 in tests/coordinator/fuzz.py."""
    rng = random.Random(block)
    for _ in range(1250):
        random_sequence(rng, 30)
    random_sequence(rng, 3000)


def test_the_machine_takes_the_edges_of_the_table_and_every_one_of_them() -> None:
    taken: dict[tuple[str, str], set[str]] = {}

    def note(machine: Machine, event: Event, before: str) -> None:
        if type(event) in {known for row in TABLE.values() for known in row}:
            taken.setdefault((before, type(event).__name__), set()).add(place(machine, event))

    rng = random.Random(5)
    for _ in range(1500):
        random_sequence(rng, 40, note)
    lines = {
        (f"{s} {p or ''}".strip(), event.__name__): edge for (s, p), row in TABLE.items() for event, edge in row.items()
    }
    assert set(lines) <= set(taken), f"never taken: {sorted(set(lines) - set(taken))}"
    ends = {Edge.TO_BUSY: "BUSY", Edge.TO_IDLE: "IDLE", Edge.REMOVE: "nowhere", Edge.RUN: "TRAINING running"}
    for (before, event), edge in lines.items():
        if edge in ends:  # promotion may follow in the same step, and a stale answer changes nothing
            assert ends[edge] in taken[before, event], (before, event, taken[before, event])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_refused_changes_nothing(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    machine = random_sequence(rng, data.draw(st.integers(0, 40)))
    now_s = min(machine.next_deadline_s - 1e-3, 1e6)
    for _ in range(20):
        before = snapshot(machine)
        try:
            event = random_event(rng, machine)
            _ = machine.settle(now_s) if event is None else machine.step(event, now_s)
        except (IllegalTransitionError, UnknownTargetError):
            assert snapshot(machine) == before
            return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_every_wait_ends(rng: random.Random, events: int) -> None:
    """With nothing but time, all workers are given up, and no deadline is left. (Hypothesis makes every choice itself
    here, so that a failure shrinks to its cause.)"""
    machine = random_sequence(rng, events)
    for _ in range(200):
        if machine.next_deadline_s == float("inf"):
            break
        machine.settle(machine.next_deadline_s)
    assert not machine.roster.workers
    assert not machine.roster.sessions
    assert not machine.roster.ghosts


def test_time_alone_orders_deadlines() -> None:
    """A heartbeat moves a lease, and the tick at the old deadline loses nobody."""
    machine = Machine(OPTIONS, term=1)
    machine.step(Register("w0", 1, "n", "g", State.BUSY), 0.0)
    machine.step(Heartbeat("w0", 1, State.BUSY, running=7), 4.0)
    assert machine.settle(5.0) == []
    assert machine.roster.workers["w0"].running == 7
    assert machine.next_deadline_s == 9.0


def test_a_session_grows_to_its_limit_only() -> None:
    machine = Machine(OPTIONS, term=1)  # max_members=3
    machine.step(RolloutStarted(1), 0.0)
    for i in range(6):
        machine.step(Register(f"w{i}", 1, "n", "g", State.BUSY), 0.0)
        machine.step(Idle(f"w{i}", 1), 0.0)
    while owing := [w for w in machine.roster if w.answer_by_s is not None]:
        session = machine.roster.sessions["g"]
        machine.step(Started(owing[0].name, 1, session.number, session.epoch, "h:1"), 0.1)
    assert list(machine.roster.sessions["g"].members) == ["w0", "w1", "w2"]
    trained: list[Any] = machine.step(Stopped("w1", 1, 1), 0.2)
    assert [t.members for t in trained if isinstance(t, Train)] == [("w0", "w2")] * 2


def test_the_manual_shows_this_table() -> None:
    """docs/concepts/coordinator.md, line by line."""
    ends = {Edge.IGNORE: "-", Edge.RUN: "running", Edge.TO_BUSY: "BUSY", Edge.TO_IDLE: "IDLE", Edge.REMOVE: "gone"}
    events = (Busy, Idle, Started, Stopped, TrainerFailed, Heartbeat, Leave)
    lines = [f"| in | {' | '.join(event.__name__ for event in events)} |", "|" + "---|" * (1 + len(events))]
    for (state, phase), row in TABLE.items():
        cells = [ends[row[event]] if event in row else "error" for event in events]
        lines.append(f"| {state} {phase or ''}".rstrip() + f" | {' | '.join(cells)} |")
    manual = Path(__file__).parents[2] / "docs" / "concepts" / "coordinator.md"
    assert "\n".join(lines) in manual.read_text(encoding="utf-8")
    assert {event for row in TABLE.values() for event in row} == set(events)
