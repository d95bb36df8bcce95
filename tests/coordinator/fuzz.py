"""As many random sequences and clusters as there is time for: `python -m tests.coordinator.fuzz --sequences 100000`.

The tests take a few hundred; this takes all cores for a night and prints every seed that breaks a rule.
"""

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.coordinator.random_events import random_sequence
from tests.coordinator.random_worlds import random_world

EVENTS = 30  # of one sequence
CHUNK = 250  # seeds of one task of a process


def sequence(seed: int) -> Counter[str]:
    """The machine alone, invariants checked after every event."""
    random_sequence(random.Random(seed), EVENTS)
    return Counter(events=EVENTS)


def world(seed: int) -> Counter[str]:
    """A simulated cluster: lost, late, doubled, overtaking messages, crashes; truth checked against the books."""
    outcome = random_world(seed).run()
    return outcome.happened + outcome.counts + Counter(events=outcome.events, virtual_s=round(outcome.virtual_s))


def over(one: Callable[[int], Counter[str]], seeds: range) -> Counter[str]:
    total: Counter[str] = Counter(cases=len(seeds))
    for seed in seeds:
        try:
            total += one(seed)
        except AssertionError as error:
            total["violations"] += 1
            print(f"{one.__name__} {seed}: {error}", flush=True)
    return total


def in_processes(one: Callable[[int], Counter[str]], count: int) -> Counter[str]:
    chunks = [range(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(over, [one] * len(chunks), chunks), Counter())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--worlds", type=int, default=10_000)
    options = parser.parse_args()
    found = [in_processes(sequence, options.sequences), in_processes(world, options.worlds)]
    for name, total in zip(("sequences", "worlds"), found, strict=True):
        print(f"{name}: {dict(sorted(total.items()))}")
    return int(any(total["violations"] for total in found))


if __name__ == "__main__":
    sys.exit(main())
