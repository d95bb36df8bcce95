"""Read what a run is doing from its folder alone, for `paceline status`. Changes nothing."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import PacelineError
from launch.observe import journal, now
from launch.observe.live import duration
from launch.observe.observer import END_EVENTS
from launch.run_folder import holder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a run. Ages are in seconds; None where there is nothing yet."""

    run: str
    state: str  # "running", "ended without a word" (killed), or the last event's kind: finished, interrupted, failed
    process: str  # which process writes to the folder, and where; empty if none does
    step: int  # last complete RL step
    steps: int | None  # of the whole run
    phase: str  # its current phase; empty unless it is running
    done: int
    total: int
    phase_age_s: float | None
    step_age_s: float | None
    metrics: dict[str, float]  # of the last step: reward/mean, tokens_per_s, seconds/step
    event: str  # the last one: kind and message
    event_age_s: float | None  # None also if the record has no time


_SHOWN = ("reward/mean", "tokens_per_s", "seconds/step")


def read_run_status(run_dir: Path, now_s: float | None = None) -> RunStatus:
    """Read the state of a run. Raises PacelineError if `run_dir` is no run's folder."""
    now_s = time.time() if now_s is None else now_s
    events = journal.read(run_dir / "events.jsonl")
    if not events:
        raise PacelineError(f"{run_dir} is not the folder of a run: it has no events.jsonl")
    steps = [row for row in journal.read(run_dir / "metrics.jsonl") if row.get("kind") == "step"]
    last, event, process = (steps[-1] if steps else {}), events[-1], holder(run_dir)
    doing = now.read(run_dir) if process else None
    ended = str(event["kind"]) if event["kind"] in END_EVENTS else "ended without a word"
    return RunStatus(
        run=run_dir.name,
        state="running" if process else ended,
        process=process,
        step=int(last.get("step", 0)),
        steps=_steps(run_dir / "config.yaml"),
        phase=doing.phase if doing is not None else "",
        done=doing.done if doing is not None else 0,
        total=doing.total if doing is not None else 0,
        phase_age_s=now_s - doing.at_s if doing is not None else None,
        step_age_s=_age(last, now_s),
        metrics={name: last[name] for name in _SHOWN if isinstance(last.get(name), float)},
        event=f"{event['kind']}: {event.get('message', '')}",
        event_age_s=_age(event, now_s),
    )


def status_lines(status: RunStatus) -> list[str]:
    """Describe the state in words."""
    of = f" of {status.steps}" if status.steps is not None else ""
    state = f"{status.state} ({status.process})" if status.process else status.state
    lines = [f"{status.run}: {state}, {status.step}{of} RL steps done"]
    if status.phase:
        count = f" {status.done}/{status.total}" if status.total else ""
        lines.append(f"now:        {status.phase}{count}{_ago(status.phase_age_s)}")
    if status.step_age_s is not None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in status.metrics.items())
        lines.append(f"last step:  {status.step}{_ago(status.step_age_s)}  {shown}".rstrip())
    lines.append(f"last event: {status.event}{_ago(status.event_age_s)}")
    return lines


def _steps(path: Path) -> int | None:
    import yaml

    try:
        return int(yaml.safe_load(path.read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def _age(record: Mapping[str, Any], now_s: float) -> float | None:
    """Return the age of a record in seconds; None if it has no time."""
    at_s = record.get("at_s")
    return now_s - at_s if isinstance(at_s, int | float) else None


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f" ({duration(max(0.0, seconds))} ago)"
