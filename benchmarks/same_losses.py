"""Compare two runs bit for bit: `python -m benchmarks.same_losses runs/before runs/after` ("proof of value").

Owns the comparison of `metrics.jsonl`; timings, and what is derived from them, are the only things allowed to differ.
Exit code 0: identical. 1: the first difference is printed. 2: a run cannot be read.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Key = tuple[int, str]  # RL step, kind of the record ("step", "eval")
BOOKKEEPING = frozenset({"step", "kind"})


def is_timed(name: str) -> bool:
    return name == "at_s" or name.startswith("seconds/") or name.endswith("_per_s")


def read_metrics(run: Path) -> dict[Key, dict[str, Any]]:
    """What `run` recorded, without timings, by step and kind. Raises OSError or ValueError naming file and line."""
    path = run / "metrics.jsonl"
    found: dict[Key, dict[str, Any]] = {}
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


def first_difference(before: dict[Key, dict[str, Any]], after: dict[Key, dict[str, Any]]) -> str | None:
    """The earliest difference in words, or None. JSON floats keep all digits, so == is bit for bit."""
    for step, kind in sorted(before.keys() | after.keys()):
        where = f"{kind} record of step {step}"
        old, new = before.get((step, kind)), after.get((step, kind))
        if old is None or new is None:
            return f"{where}: only in the {'second' if old is None else 'first'} run"
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new or old[name] != new[name]:
                return f"{where}: {name} is {old.get(name)!r} and {new.get(name)!r}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Are the metrics of two runs identical (timings aside)?")
    parser.add_argument("before", type=Path, help="run folder")
    parser.add_argument("after", type=Path, help="run folder")
    options = parser.parse_args()
    try:
        before, after = read_metrics(options.before), read_metrics(options.after)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    difference = first_difference(before, after)
    print(difference or f"identical: {len(before)} records")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
