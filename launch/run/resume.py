"""May this configuration go on with that run? Compares it with the one that the run's folder holds; changes nothing.

What only changes how fast, where or how long a run goes may differ. Everything else (reward, data, objective, model,
optimizer, seed, how a response is measured, ...) would make one curve out of two experiments: it is refused unless it
is allowed by name, and every difference leaves an event.
"""

import filecmp
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.training.checkpoint import latest_checkpoint
from launch.config import Config
from launch.config.document import parse_document
from launch.config.load import validate
from launch.config.paths import INPUT_PATHS
from launch.config.schema import generic, render
from launch.errors import PacelineError

FILE = "config.yaml"
# Keys, or the sections above them. No token and no loss depends on them, apart from rounding.
HARMLESS = (
    *("run.steps", "run.dir", "run.name", "observe", "checkpoint", "cluster", "coordinator", "drafter"),
    *("rollout.workers", "rollout.engine", "rollout.speculation", "rollout.max_retries", "rollout.max_worker_restarts"),
    *("rollout.stall_timeout_s", "rollout.weight_sync_timeout_s", "rollout.max_logprob_gap", "eval.every"),
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
HARMFUL = (  # below a harmless section
    "rollout.engine.backend",
    "rollout.engine.max_model_tokens",
    "rollout.speculation.verification",
)


class ResumeError(PacelineError):
    """There is nothing to go on with, or it would not be the same experiment."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value is another one than the run's."""

    key: str
    before: str
    now: str

    @property
    def harmless(self) -> bool:
        return covers(HARMLESS, generic(self.key)) and not covers(HARMFUL, self.key)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def can_resume(config: Config) -> bool:
    """Whether the run of this configuration has a checkpoint to go on from."""
    return latest_checkpoint(Path(config.run.dir) / config.run.name / "checkpoints") is not None


def checkpoint_to_resume(run_dir: Path) -> Path:
    """The newest checkpoint. Raises ResumeError if there is none."""
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise ResumeError(
            f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}",
            remedy="start without --resume (a folder that is there is kept under another name), or check run.dir and "
            "run.name",
        )
    return checkpoint


def check_resume(run_dir: Path, config: Config, allowed: Sequence[str] = ()) -> list[Difference]:
    """What differs from the run's own configuration. Raises ResumeError if it matters and is not in `allowed` (keys, or
    sections above them)."""
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
    """Every key whose value differs. A configuration that cannot be read is one difference, of the key config.yaml."""
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
    """Is the key one of `names`, or below one of them?"""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(config: Config) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value; lists of sections element by element."""
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
    """Two places of the same input: a job's copy of the checkout has another name at every submission."""
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
    """The path inside what `ray job submit` uploaded; None: it is not there."""
    parts = Path(path).parts
    packages = [i for i, part in enumerate(parts) if part.startswith("_ray_pkg_")]
    return parts[packages[0] + 1 :] if packages else None
