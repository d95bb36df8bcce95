"""Bounds what all processes of one grading hold together: a limit of the kernel's is per process. Owns the measuring;
what is done about it is main.py's.

The supervisor samples the resident memory of every process below it. No memory escapes the samples where system calls
are filtered: what is resident in no process (memfd, SysV segments, shared mappings) is refused there.
"""

# ruff: noqa: PTH123, PTH208
# (Every import delays every graded program: no pathlib.)
import os

INTERVAL_S = 0.02
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measurable() -> bool:
    """Whether the system lists the children of a process."""
    try:
        children(os.getpid())
    except OSError:
        return False
    return True


def children(pid: int) -> list[int]:
    """Children of all its threads. OSError if there is no such process, or no such list."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as stream:
            found += [int(child) for child in stream.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Every process below this one."""
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
    """Whether these processes hold more than that together, pages that they share counted once.

    Counting once takes the kernel a walk of all pages, so it is asked only where the plain sum is too large.
    """
    return sum(map(_resident_bytes, pids)) > limit_bytes and sum(map(_share_bytes, pids)) > limit_bytes


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as stream:
            return int(stream.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def _share_bytes(pid: int) -> int:
    """Its pages, each divided by the number of processes that have it; the undivided sum of who does not let it be
    read (the judge)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as stream:
            return next(int(line.split()[1]) << 10 for line in stream if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident_bytes(pid)
