"""What a benchmark's figures were measured on. Reads, never changes, the machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine(packages: tuple[str, ...] = ("torch", "ray", "transformers")) -> dict[str, Any]:
    """CPU model, usable cores, load average of the last minute, Python and package versions."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := installed_version(name)) is not None},
    }


def is_busy() -> bool:
    """Whether other work was using more than half a core in the last minute. OpenMP threads that wait for each other
    spin, so a program with as many threads as cores can then be tens of times slower: its timings mean nothing."""
    return os.getloadavg()[0] > 0.5


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
