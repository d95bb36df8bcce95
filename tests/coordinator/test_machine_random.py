"""Whatever order events come in: the invariants of the machine hold after each."""

import random

import pytest

from coordinator.events import Event
from coordinator.machine import Machine
from tests.coordinator.invariants import random_sequence


@pytest.mark.parametrize("seed", range(8))
def test_invariants_hold_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    seen: set[str] = set()

    def note(machine: Machine, event: Event, now_s: float) -> None:
        seen.add(type(event).__name__)
        seen.update(f"{len(s.members)} members" for s in machine.roster.sessions.values())

    for _ in range(250):
        random_sequence(rng, 30, note)
    random_sequence(rng, 3000, note)
    assert {"Register", "Started", "Stopped", "3 members"} <= seen
