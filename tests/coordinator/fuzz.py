"""As many random sequences and clusters as there is time for: `python -m tests.coordinator.fuzz --sequences 100000`.

The tests take 1,000 worlds; this takes all cores for a night and prints every seed that breaks a rule.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from benchmarks.harness import RESULTS, load, machine, save
from tests.coordinator.random_events import random_sequence
from tests.coordinator.random_worlds import random_world

RECORD = RESULTS / "coordinator.json"
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
    parser.add_argument("--record", action="store_true", help="into benchmarks/results/coordinator.json")
    options = parser.parse_args()
    record = load(RECORD) if options.record else {}
    violations = 0
    for one, count in ((sequence, options.sequences), (world, options.worlds)):
        start_s = time.monotonic()
        total = in_processes(one, count)
        violations += total["violations"]
        print(f"{one.__name__}s: {dict(sorted(total.items()))}", flush=True)
        if count:
            found = {"violations": 0} | dict(sorted(total.items())) | {"taken_s": round(time.monotonic() - start_s, 1)}
            record[f"random_{one.__name__}s"] = {"machine": machine(), "found": found}
    if options.record:
        save(RECORD, record)
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
