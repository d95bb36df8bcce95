"""Compare two runs bit for bit: `python -m benchmarks.same_losses runs/before runs/after` ("proof of value").

Owns what must be equal in two run folders: every metric of sampling and learning, each response's length, and the text
and reward of each recorded one. Timings may differ, and so may results of the clock (which worker did what, how often,
with which drafts). Those are reported, but do not count as differences.
Exit code 0: identical. 1: the first difference is printed. 2: a run cannot be read.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.observe.journal import read

Key = tuple[int, str]  # RL step, kind of the record ("step", "eval")
Metrics = dict[Key, dict[str, Any]]
BOOKKEEPING = frozenset({"step", "kind"})
# Which worker did the work, in how many engine steps, with which drafts: results of measured time (lossless).
BY_THE_CLOCK = (
    "engine/", "speculation/", "drafter/", "recording/", "logprob_gap/worker/", "rollouts/reissued", "workers/lost",
    "weights/", "learner/", "fleet/", "lookahead/", "turns/prefilled_tokens", "turns/waited_s",
)  # fmt: skip


def is_timed(name: str) -> bool:
    return name == "at_s" or name.startswith("seconds/") or name.endswith("_per_s")


def read_metrics(run: Path) -> Metrics:
    """Return the metrics of `run` without timings, by step and kind. Raises OSError or ValueError naming
    file and line."""
    path = run / "metrics.jsonl"
    found: Metrics = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            key = (int(record["step"]), str(record["kind"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a metrics record ({error!r})") from error
        found[key] = {name: value for name, value in record.items() if not is_timed(name) and name not in BOOKKEEPING}
    if not found:
        raise ValueError(f"{path}: no records")
    return found


def first_difference(before: Path, after: Path, new: Sequence[str] = ()) -> str | None:
    """Return the first difference that two runs must not have, in words; None if they sampled and learned the same.
    `new`: metrics that the first run's version did not write. Raises as `read_metrics`."""
    records = read_metrics(after)
    for record in records.values():
        for name in new:
            record.pop(name, None)
    return _first_metric(read_metrics(before), records) or _first_response(before, after)


def _first_metric(before: Metrics, after: Metrics) -> str | None:
    """Return the earliest difference. JSON floats keep all digits, so == is bit for bit."""
    for step, kind in sorted(before.keys() | after.keys()):
        where = f"{kind} record of step {step}"
        old, new = before.get((step, kind)), after.get((step, kind))
        if old is None or new is None:
            return f"{where}: only in the {'second' if old is None else 'first'} run"
        for name in differing(old, new):
            if not name.startswith(BY_THE_CLOCK):
                return f"{where}: {name} is {old.get(name)!r} and {new.get(name)!r}"
    return None


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return names with two values, or with one; sorted, those in both first."""
    unequal = [name for name in old.keys() | new.keys() if name not in old or name not in new or old[name] != new[name]]
    return sorted(unequal, key=lambda name: (not (name in old and name in new), name))


def _first_response(before: Path, after: Path) -> str | None:
    """Compare the responses as a set, since they are in the order of their grading."""
    for name in ("lengths.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        old, new = read(before / name), read(after / name)
        fields = set.intersection(*({key for record in records for key in record} for records in (old, new))) - {"at_s"}
        mine, theirs = _in_order(old, fields), _in_order(new, fields)
        if mine != theirs:
            at = next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), "one ends early")
            return f"{name}: {len(mine)} and {len(theirs)} records; {at}"
    return None


def _in_order(records: list[dict[str, Any]], fields: set[str]) -> list[str]:
    return sorted(
        json.dumps({key: value for key, value in record.items() if key in fields}, sort_keys=True) for record in records
    )


def clocked(before: Metrics, after: Metrics) -> dict[str, int]:
    """Return the number of clock-dependent metrics that differ somewhere, by prefix."""
    names = {name for key in before.keys() & after.keys() for name in differing(before[key], after[key])}
    return Counter(sorted(start for name in names for start in BY_THE_CLOCK if name.startswith(start)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Did two runs sample and learn the same, bit for bit?")
    parser.add_argument("before", type=Path, help="run folder")
    parser.add_argument("after", type=Path, help="run folder")
    parser.add_argument("--new", action="append", default=[], metavar="NAME", help="metric that only `after` may have")
    options = parser.parse_args()
    try:
        before, after = read_metrics(options.before), read_metrics(options.after)
        difference = first_difference(options.before, options.after, options.new)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(difference or f"identical: {len(before)} records")
    if apart := clocked(before, after):
        counts = ", ".join(f"{start} ({count})" for start, count in apart.items())
        print(f"by the clock, and allowed to differ: {counts}")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
