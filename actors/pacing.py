"""Paces parts of a run to the durations of a Pace: the process that did the work sleeps for the rest.

Counts the late parts: work that took this machine longer than its pace, which a paced run cannot represent. For
experiments; no product path has a Pacer.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

from policies.roofline.pace import Pace

_WRITE_S = 0.5  # between two writes of the tally


@dataclass(slots=True)
class Tally:
    """Totals of one kind of part."""

    count: int = 0
    late: int = 0  # took longer than its pace
    own_s: float = 0.0  # duration of the work itself
    paced_s: float = 0.0  # intended duration
    spent_s: float = 0.0  # actual duration


class Pacer:
    """Pacer of one process. `clock`: the clock of the paced part, in seconds."""

    def __init__(
        self,
        pace: Pace,
        part: str,
        *,
        clock: Callable[[], float] = perf_counter,
        sleeps: Callable[[float], None] = sleep,
    ) -> None:
        """`part`: name of the process, for the tally's file."""
        self.pace, self.clock, self._sleep = pace, clock, sleeps
        self.tallies: dict[str, Tally] = {}
        self._path = Path(pace.tally_dir) / f"{part}-{os.getpid()}.json" if pace.tally_dir else None
        self._written_s = -_WRITE_S

    def hold(self, kind: str, begin_s: float, device_s: float) -> None:
        """Return once `device_s` seconds of the device have passed since `begin_s` of the clock; at once if late."""
        own_s, wanted_s = self.clock() - begin_s, device_s * self.pace.scale
        tally = self.tallies.setdefault(kind, Tally())
        tally.count += 1
        tally.own_s += own_s
        tally.paced_s += wanted_s
        if own_s > wanted_s:
            tally.late += 1
        else:
            self._sleep(wanted_s - own_s)
        tally.spent_s += max(own_s, wanted_s)
        if self._path is not None and self.clock() - self._written_s >= _WRITE_S:
            self.write()

    def stretch(self, kind: str, begin_s: float) -> None:
        """Stretch host work since `begin_s` to `scale` times its duration: the device's host is assumed to take as long
        as ours. It is never late, and not counted."""
        own_s, scale = self.clock() - begin_s, max(self.pace.scale, 1.0)
        self._sleep(own_s * (scale - 1))
        self.tallies.setdefault(kind, Tally()).spent_s += own_s * scale

    def write(self) -> None:
        """Write the tally, if it has a file."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found, beside = (
                {kind: asdict(tally) for kind, tally in self.tallies.items()},
                self._path.with_suffix(".new"),
            )
            beside.write_text(json.dumps(found), encoding="utf-8")
            beside.replace(self._path)
            self._written_s = self.clock()


def read_tallies(folder: Path) -> dict[str, Tally]:
    """Return tallies by kind, summed over the processes that wrote into `folder`."""
    total: dict[str, Tally] = {}
    for path in sorted(folder.glob("*.json")):
        for kind, values in json.loads(path.read_text(encoding="utf-8")).items():
            tally, one = total.setdefault(kind, Tally()), Tally(**values)
            tally.count += one.count
            tally.late += one.late
            tally.own_s += one.own_s
            tally.paced_s += one.paced_s
            tally.spent_s += one.spent_s
    return total
