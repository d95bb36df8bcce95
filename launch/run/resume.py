"""Whether a configuration may continue a run, and from which checkpoint. Compares it with the configuration in the
run's folder, and finds the newest intact checkpoint. Only `Resumption.clear` changes anything.

Settings of the speed, place or duration of a run may differ. Any other difference (reward, data, objective, model,
optimizer, seed, how a response is measured, ...) would make one curve out of two experiments. It is refused unless it
is allowed by name, and every difference is recorded as an event.
"""

import filecmp
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.training.checkpoint import (
    Checked,
    CheckpointError,
    checkpoints,
    latest_checkpoint,
    step_of,
)
from launch.config import Config
from launch.config.document import parse_document
from launch.config.load import validate
from launch.config.paths import INPUT_PATHS
from launch.config.schema import generic, render
from launch.errors import PacelineError
from models.durable import put_aside

FILE = "config.yaml"
UNSEALED = "an earlier version wrote it, without checksums: whether its files are damaged cannot be told"
# Keys or sections on which no token and no loss depends, apart from rounding.
HARMLESS = (
    *("run.steps", "run.dir", "run.name", "observe", "checkpoint", "cluster", "coordinator", "drafter"),
    *("rollout.workers", "rollout.engine", "rollout.speculation", "rollout.max_retries", "rollout.max_worker_restarts"),
    *("rollout.stall_timeout_s", "rollout.weight_sync_timeout_s", "rollout.max_logprob_gap", "eval.every"),
    *("rollout.lookahead", "rollout.probe_first"),
    *("learner.ranks", "learner.device", "learner.threads", "learner.micro_batch_tokens", "learner.packing"),
    *(
        "learner.activation_checkpointing",
        "learner.timeout_s",
        "learner.max_restarts",
        "reward.workers",
        "reward.max_failures_per_step",
    ),
    *(f"reward.terms.*.{name}" for name in ("concurrency", "cpus", "gpus", "retries", "url", "key_env")),
)
HARMFUL = (  # exceptions within a harmless section
    "rollout.engine.backend",
    "rollout.engine.max_model_tokens",
    "rollout.speculation.verification",
)


class ResumeError(PacelineError):
    """There is nothing to continue from, or it would not be the same experiment."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value differs from the run's."""

    key: str
    before: str
    now: str

    @property
    def harmless(self) -> bool:
        return covers(HARMLESS, generic(self.key)) and not covers(HARMFUL, self.key)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def can_resume(config: Config) -> bool:
    """Whether the run of this configuration has a checkpoint to continue from."""
    return latest_checkpoint(Path(config.run.dir) / config.run.name / "checkpoints") is not None


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint from which a run continues, and the later ones that it ignores."""

    checkpoint: Path
    checked: Checked
    damaged: tuple[tuple[Path, str], ...] = ()  # newer ones, each with its fault
    later: tuple[Path, ...] = ()  # later than the requested step

    def clear(self) -> list[tuple[str, str]]:
        """Rename what follows the checkpoint, so that nothing overwrites it, and damaged dispensable folders in it.
        Returns events, (kind, message)."""
        said = []
        here = self.checkpoint.name
        for path, why in self.damaged:
            aside = put_aside(path, "damaged")
            said.append(
                (
                    "checkpoint_damaged",
                    f"{why}. The run goes on from {here}, the newest that is intact, and repeats what came after it. "
                    f"{aside} is not used any more: it may be deleted",
                )
            )
        for path in self.later:
            aside = put_aside(path, "later")
            said.append(("set_aside", f"the run goes on from {here}, as asked: {path.name} is now {aside}"))
        for name in dict.fromkeys(fault.file.partition("/")[0] for fault in self.checked.spare):
            fault = next(fault for fault in self.checked.spare if fault.file.startswith(name))
            if (folder := self.checkpoint / name).is_dir():
                folder.rename(folder.with_name(f".{name}.damaged"))
            what = f"{fault} in {here}: the run goes on without {name}, on which no token depends"
            said.append(("drafter_damaged", what))
        if not self.checked.sealed:
            said.append(("checkpoint_unverified", f"{here}: {UNSEALED}"))
        return said


def checkpoints_to_resume(run_dir: Path, step: int | None = None) -> list[Path]:
    """Return the run's checkpoints, or only that of `step`. Raises ResumeError if there is none."""
    there = checkpoints(run_dir / "checkpoints")
    if not there:
        raise ResumeError(
            f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}",
            remedy="start without --resume (a folder that is there is kept under another name), or check run.dir and "
            "run.name",
        )
    chosen = [path for path in there if step in (None, step_of(path))]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in there)
        raise ResumeError(f"--step: there is no checkpoint of step {step} in {run_dir}", remedy=f"there are {steps}")
    return chosen


def find_checkpoint(run_dir: Path, step: int | None, usable: Callable[[Path], Checked]) -> Resumption:
    """Return the newest checkpoint for which `usable` raises no CheckpointError, or that of `step`. Raises ResumeError
    with the fault of each of them."""
    damaged = list[tuple[Path, str]]()
    for path in reversed(checkpoints_to_resume(run_dir, step)):
        try:
            checked = usable(path)
        except CheckpointError as error:
            damaged.append((path, str(error)))
            continue
        newer = checkpoints(run_dir / "checkpoints") if step is not None else []
        later = tuple(other for other in newer if step_of(other) > step_of(path))
        return Resumption(path, checked, tuple(damaged), later)
    if step is not None:
        remedy = "give another --step, or none: --resume alone takes the newest checkpoint that is intact"
        raise ResumeError(f"--step {step}: {damaged[0][1]}", remedy=remedy)
    raise ResumeError(
        f"--resume: no checkpoint in {run_dir / 'checkpoints'} can be used:\n"
        + "\n".join(f"  {why}" for _, why in damaged),
        remedy="bring one of them back from a copy, or start without --resume: the folder is kept under another name",
    )


def check_resume(run_dir: Path, config: Config, allowed: Sequence[str] = ()) -> list[Difference]:
    """Return the differences from the run's own configuration. Raises ResumeError if one matters and is not in
    `allowed` (keys, or sections above them)."""
    found = differences(run_dir, config)
    refused = [difference for difference in found if not (difference.harmless or covers(allowed, difference.key))]
    if refused:
        flags = " ".join(f"--allow {difference.key}" for difference in refused)
        raise ResumeError(
            "--resume: this is not the configuration that the run was made with:\n"
            + "\n".join(f"  {difference}" for difference in refused),
            remedy=f"undo the change, give it another run.name, or go on nevertheless with: --resume {flags}",
        )
    return found


def differences(run_dir: Path, config: Config) -> list[Difference]:
    """Return every key whose value differs. An unreadable configuration is one difference, of the key config.yaml."""
    path = run_dir / FILE
    try:
        document = parse_document(path.read_text(encoding="utf-8"), str(path))
        before, issues = validate(document, str(path))
    except (OSError, UnicodeDecodeError) as error:
        return [Difference(FILE, f"cannot be read ({error})", "this one")]
    if before is None or document.issues or issues:
        why = [*document.issues, *issues][0]
        return [Difference(FILE, f"not one of this version ({why.key}: {why.message})", "this one")]
    old, new = dict(_flat(before)), dict(_flat(config))
    keys = dict.fromkeys([*new, *old])
    return [
        Difference(key, _shown(old, key), _shown(new, key))
        for key in keys
        if old.get(key) != new.get(key)
        and not (generic(key) in INPUT_PATHS and _same_files(old.get(key), new.get(key)))
    ]


def covers(names: Sequence[str], key: str) -> bool:
    """Whether the key is one of `names`, or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value; lists of sections element by element."""
    stack: list[tuple[str, Any]] = [("", json.loads(config.model_dump_json()))]
    while stack:
        name, value = stack.pop()
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            stack += [(f"{name}.{part}".lstrip("."), inner) for part, inner in reversed(value.items())]
        else:
            yield name, value


def _shown(values: dict[str, Any], key: str) -> str:
    return render(values[key]) if key in values else "none"


def _same_files(before: object, now: object) -> bool:
    """Whether two paths are the same input. A job's copy of the checkout has another name at every submission."""
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    if _below_package(before) == _below_package(now) is not None:
        return True
    old, new = Path(before), Path(now)
    if old.is_file() and new.is_file():
        return filecmp.cmp(old, new, shallow=False)
    if not (old.is_dir() and new.is_dir()):
        return False
    names = [sorted((file.name, file.stat().st_size) for file in path.iterdir()) for path in (old, new)]
    return names[0] == names[1] and _same_files(str(old / "config.json"), str(new / "config.json"))


def _below_package(path: str) -> tuple[str, ...] | None:
    """Return the path inside what `ray job submit` uploaded; None if it is not there."""
    parts = Path(path).parts
    packages = [i for i, part in enumerate(parts) if part.startswith("_ray_pkg_")]
    return parts[packages[0] + 1 :] if packages else None
