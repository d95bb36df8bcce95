"""How much of the machine's memory this process may use: the limit of its control group counts too, as in a container.

Reads cgroup v2 (memory.max) and v1 (memory.limit_in_bytes), of the process's group and of all groups above it.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# By version: the limit, what is used, and the line of memory.stat with file pages that the kernel takes back first.
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def total_bytes(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the smallest limit, at most the machine's memory. `groups`, `mount`: as Linux has them."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, mount))])


def available_bytes(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return what is left of the tightest limit, at most the machine's available memory, at least 0."""
    left = (max(limit - used, 0) for limit, used in _limits(groups, mount))
    return min([psutil.virtual_memory().available, *left])


def _limits(groups: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each group that has a limit."""
    for folder, (limit_file, used_file, reclaimed) in _folders(groups, mount):
        with suppress(OSError, ValueError):  # no such group in this mount, or the word "max"
            limit, used = int((folder / limit_file).read_text()), 0
            with suppress(OSError, ValueError):
                used = int((folder / used_file).read_text())
                lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used -= next((int(line[1]) for line in lines if line[0] == reclaimed), 0)
            yield limit, used


def _folders(groups: Path, mount: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield each group's folder. A container may see its own group as the mount's root, whatever it is called."""
    lines = []
    with suppress(OSError):
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    for _, controllers, name in lines:
        if not controllers:
            roots, version = (mount, mount / "unified"), _V2
        elif "memory" in controllers.split(","):
            roots, version = (mount / "memory", mount / controllers), _V1
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for root in dict.fromkeys(roots):
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:depth]), version
