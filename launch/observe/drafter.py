"""Results of drafter training, from trainers' events to numbers for people: per RL step and over a run.

Owns the record of drafter.jsonl and the metrics `drafter/*`. Pure: no files, no clock.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, assert_never

from config.catalogue import TRAINED
from contracts.rollout import DraftCounts
from contracts.spot import (
    Checkpointed,
    MicroStep,
    NeedData,
    Skipped,
    TrainedWeights,
    TrainerEvent,
    TrainFailed,
    TrainStarted,
    TrainStopped,
)
from launch.observe.speculation import StepSpeculation, by_drafter, drafter_of, thinned
from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.lineage import micro_steps

TRAIN_SPAN = "train_drafter"  # on the worker's row of the timeline
MAX_UPDATES = 2000  # in one record


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One micro-step of all its members. Means are over their supervised positions; None without any."""

    step: int  # micro-steps of the drafter since its first
    at_s: float
    seconds: float  # of the slowest member
    loss: float | None
    accuracy: float | None
    top3_accuracy: float | None
    tokens: int
    target_version: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafter:
    """One RL step, all workers. It begins where the last one was taken: trainers do not wait for RL steps."""

    updates: Sequence[Update]
    worker_s: float  # spent in micro-steps, summed over workers
    # published, rolled_back, preempted, failures, recorded_bytes, recording_skipped, recording_s, cpu_s
    counts: Mapping[str, float]
    levels: Mapping[str, float]  # version, stale_versions, buffer_bytes, buffer_sequences, stop_s: those known
    published: Sequence[int] = ()  # versions
    rolled_back: Sequence[int] = ()
    drafted: DraftCounts | None = None  # what engines did with it
    acceptance: AcceptanceTally = field(default_factory=AcceptanceTally)  # the same by strategy

    def metrics(self) -> dict[str, float]:
        """Return the scalars `drafter/*`; those without a value are left out."""
        values: dict[str, float | None] = {
            "micro_steps": float(len(self.updates)),
            "tokens": float(sum(update.tokens for update in self.updates)),
            "worker_s": self.worker_s,
            "loss": _mean((update.loss, update.tokens) for update in self.updates),
            "accuracy": _mean((update.accuracy, update.tokens) for update in self.updates),
            "top3_accuracy": _mean((update.top3_accuracy, update.tokens) for update in self.updates),
            **self.counts,
            **self.levels,
        }
        if self.drafted is not None:
            values |= {"acceptance": self.drafted.acceptance, "accept_length": self.drafted.accept_length}
        return {f"drafter/{name}": value for name, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Updates as [step, ms since origin_s, ms, loss, accuracy, top-3 accuracy, tokens, target version, members]."""
        origin_s = min((update.at_s for update in self.updates), default=0.0)
        return {
            "origin_s": round(origin_s, 4),
            "updates": [
                [
                    update.step,
                    round((update.at_s - origin_s) * 1000, 1),
                    round(update.seconds * 1000, 2),
                    *(_rounded(x) for x in (update.loss, update.accuracy, update.top3_accuracy)),
                    update.tokens,
                    update.target_version,
                    update.members,
                ]
                for update in thinned(self.updates, MAX_UPDATES)
            ],
            "micro_steps": len(self.updates),
            "worker_s": round(self.worker_s, 4),
            "published": list(self.published),
            "rolled_back": list(self.rolled_back),
            "counts": dict(self.counts),
            "levels": dict(self.levels),
        }


class DrafterMeter:
    """Adds up the events of all workers' trainers until `take`. Not thread-safe, like SpeculationMeter."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._trained_on: int | None = None  # the newest target version seen by a micro-step
        self._buffers: dict[str, tuple[int, int]] = {}
        self._clear()

    def _clear(self) -> None:
        self._steps: list[MicroStep] = []
        self._published: list[int] = []
        self._rolled_back: list[int] = []
        self._counts: Counter[str] = Counter()
        self._stop_s: float | None = None
        self._recording_s = self._cpu_s = 0.0

    def event(self, worker: str, event: TrainerEvent) -> None:
        """Take an event of a worker's trainer."""
        match event:
            case MicroStep():
                self._steps.append(event)
                self._trained_on = max(event.target_version, self._trained_on or 0)
            case TrainedWeights():
                self.published(event.manifest.version)
            case TrainStopped(seconds=seconds, reason=reason, cpu_s=cpu_s):
                self._stop_s = max(seconds, self._stop_s or 0.0)
                self._cpu_s += cpu_s
                self._counts["preempted"] += not reason
            case TrainFailed():
                self._counts["failures"] += 1
            case TrainStarted() | NeedData() | Skipped() | Checkpointed():
                pass
            case _:
                assert_never(event)

    def published(self, version: int) -> None:
        """Count published weights that do not arrive as an `event`."""
        self._published.append(micro_steps(version))

    def swapped(self, version: int) -> None:
        """Engines draft with this version from now on."""
        self._version = micro_steps(version)

    def rolled_back(self, version: int) -> None:
        """This version was rolled back; `swapped` reports its replacement."""
        self._rolled_back.append(micro_steps(version))

    def buffer(self, node: str, *, sequences: int, bytes: int) -> None:
        """Set what a node's data buffer holds now."""
        self._buffers[node] = sequences, bytes

    def recorded(self, bytes: int, seconds: float = 0.0, skipped: int = 0) -> None:
        """Count hidden states that an engine or the learner handed over since its last report: their bytes, the seconds
        it took, and the number of skipped sequences."""
        self._counts["recorded_bytes"] += bytes
        self._counts["recording_skipped"] += skipped
        self._recording_s += seconds

    def take(self, target_version: int, speculation: StepSpeculation | None = None) -> StepDrafter:
        """Return everything since the last `take`. target_version: the target weights that engines decoded with.
        speculation: of the same RL step."""
        levels: dict[str, float | None] = {
            "version": self._version,
            "stale_versions": None if self._trained_on is None else max(target_version - self._trained_on, 0),
            "buffer_sequences": sum(n for n, _ in self._buffers.values()) if self._buffers else None,
            "buffer_bytes": sum(n for _, n in self._buffers.values()) if self._buffers else None,
            "stop_s": self._stop_s,
        }
        names = "preempted", "failures", "recorded_bytes", "recording_skipped"
        counts = {name: float(self._counts[name]) for name in names} | {
            "recording_s": self._recording_s,
            "cpu_s": self._cpu_s,
        }
        counts |= {"published": float(len(self._published)), "rolled_back": float(len(self._rolled_back))}
        strategies = {} if speculation is None else speculation.strategies
        used, acceptance = by_drafter(strategies).get(TRAINED), AcceptanceTally()
        for name, done in strategies.items():
            if drafter_of(name) == TRAINED:
                acceptance.add(name, done.drafted, done.accepted)
        taken = StepDrafter(
            updates=merged(self._steps),
            worker_s=sum(step.seconds for step in self._steps),
            counts=counts,
            levels={name: float(value) for name, value in levels.items() if value is not None},
            published=tuple(self._published),
            rolled_back=tuple(self._rolled_back),
            drafted=used,
            acceptance=acceptance,
        )
        self._clear()
        return taken


def merged(steps: Iterable[MicroStep]) -> list[Update]:
    """Merge the members' reports of each micro-step, ordered by time."""
    members: defaultdict[tuple[int, int, int], list[MicroStep]] = defaultdict(list)
    for step in steps:
        members[step.session, step.epoch, step.step].append(step)
    return sorted((_update(reports) for reports in members.values()), key=attrgetter("at_s"))


def _update(reports: Sequence[MicroStep]) -> Update:
    first = min(reports, key=attrgetter("started_s"))
    return Update(
        step=micro_steps(first.step),
        at_s=first.started_s,
        seconds=max(report.seconds for report in reports),
        loss=_mean((report.loss, report.tokens) for report in reports),
        accuracy=_mean((report.accuracy, report.tokens) for report in reports),
        top3_accuracy=_mean((report.top3_accuracy, report.tokens) for report in reports),
        tokens=sum(report.tokens for report in reports),
        target_version=max(report.target_version for report in reports),
        members=max(report.members for report in reports),
    )


def updates_of(record: Mapping[str, Any]) -> list[Update]:
    """Return the updates of one record of drafter.jsonl; [] for a foreign record."""
    try:
        origin_s = float(record["origin_s"])
        return [
            Update(
                step=step,
                at_s=origin_s + ms / 1000,
                seconds=duration / 1000,
                loss=loss,
                accuracy=accuracy,
                top3_accuracy=top3,
                tokens=tokens,
                target_version=target,
                members=members,
            )
            for step, ms, duration, loss, accuracy, top3, tokens, target, members in record["updates"]
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _mean(parts: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the weighted mean of (value, weight); None without any."""
    known = [(value, weight) for value, weight in parts if weight and value is not None and math.isfinite(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
