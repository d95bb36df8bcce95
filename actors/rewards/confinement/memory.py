"""Bounds the memory of all processes of one grading together: the kernel's limit is per process. Owns the measurement;
main.py acts on it.

The supervisor samples the resident memory of every process below it. Where system calls are filtered, no memory
escapes: memory that is resident in no process (memfd, SysV segments, shared mappings) is refused.
"""

# ruff: noqa: PTH123, PTH208
# (Every import delays every graded program: no pathlib.)
import os

INTERVAL_S = 0.02
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measurable() -> bool:
    """Return whether the system lists the children of a process."""
    try:
        children(os.getpid())
    except OSError:
        return False
    return True


def children(pid: int) -> list[int]:
    """Return the children of all its threads. OSError without such a process or list."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as stream:
            found += [int(child) for child in stream.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return every process below this one."""
    found, open_ends = [], [pid]
    while open_ends:
        try:
            below = children(open_ends.pop())
        except OSError:
            continue  # it has ended
        found += below
        open_ends += below
    return found


def exceeds(pids: list[int], limit_bytes: int) -> bool:
    """Return whether these processes together hold more than the limit, with shared pages counted once.

    The exact count makes the kernel walk all pages, so it is taken only if the plain sum is too large.
    """
    return sum(map(_resident_bytes, pids)) > limit_bytes and sum(map(_share_bytes, pids)) > limit_bytes


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as stream:
            return int(stream.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def _share_bytes(pid: int) -> int:
    """Return a process's pages, each divided by the number of its owners; the resident size if that cannot be read (the
    judge)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as stream:
            return next(int(line.split()[1]) << 10 for line in stream if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident_bytes(pid)
