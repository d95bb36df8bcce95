"""Ray's processes on this machine: the servers of this node, and the processes that a killed driver's head leaves.

Owns how they are recognised. A killed driver takes its head's servers with it, but not their agents, which hold some
200 MB for good. So a private head's session folder is marked with its driver. The next start of a head ends the
processes that belong to folders whose driver is gone. A process belongs if it is this user's and has a file below the
folder open for writing. Titles of Ray's processes are not reliable, and a mere reader of a log is not touched.

A private head's servers get sessions of their own, so that a signal to the driver's process group (Ctrl-C, `timeout`)
reaches the driver only. They still end with the driver: Ray asks the kernel for that, regardless of sessions.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "paceline_driver"
_PROC = Path("/proc")
_AFTERWARDS = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
for pid in sys.argv[2:]:
    try:
        os.kill(int(pid), 9)
    except OSError:
        pass
"""

_detaching: set[int] = set()  # threads whose new processes start their own session


def _detach() -> None:
    if threading.get_ident() in _detaching:
        os.setsid()


os.register_at_fork(after_in_child=_detach)


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Let each process that this thread forks in the block start its own session. It applies to os.fork() and to
    subprocess with a `preexec_fn`, which is how Ray starts its servers (ray/_private/services.py, start_ray_process).
    It must happen in the fork, since a process that already runs another program cannot be moved."""
    _detaching.add(threading.get_ident())
    try:
        yield
    finally:
        _detaching.discard(threading.get_ident())


def servers_of(node_id: str) -> dict[str, int]:
    """Return the process ids of that node's raylet and, on the head, of the GCS, as far as they run on this machine."""
    arguments = {"raylet": f"--node_id={node_id}", "gcs_server": f"--node-id={node_id}"}
    found = {}
    for path in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            name = (path / "comm").read_text().strip()
            if name in arguments and arguments[name].encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found[name] = int(path.name)
    return found


def mark(session: Path) -> None:
    """Mark this process as the driver of the head with that session folder."""
    (session / MARK).write_text(f"{os.getpid()} {_started(os.getpid())}\n", encoding="ascii")


def sweep(root: Path) -> int:
    """End the processes of heads below `root` whose drivers are gone. Returns their number."""
    ended = 0
    for path in {path.resolve() for path in root.glob(f"session_*/{MARK}")}:  # one of them is session_latest, a link
        with suppress(OSError, ValueError):
            if path.stat().st_uid != os.getuid():
                continue
            pid, started = path.read_text(encoding="ascii").split()
            if _started(int(pid)) != started:
                ended += end_processes(path.parent)
                path.unlink()
    return ended


def end_processes(session: Path) -> int:
    """Send SIGKILL to all processes of a session's folder except this one. Returns their number."""
    found = _others(session)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def end_processes_afterwards(session: Path) -> None:
    """Do the same from another process as soon as this one is over. When the raylet goes, a call into Ray that waits
    for it ends this process at once, with Ray's own exit code."""
    command = [sys.executable, "-I", "-S", "-c", _AFTERWARDS, *map(str, (os.getpid(), *_others(session)))]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def processes_below(folder: Path) -> list[int]:
    """Return this user's processes that have a file below the folder open for writing."""
    resolved = folder.resolve()
    return [pid for pid in _processes() if _writes_below(pid, resolved)]


def _others(session: Path) -> list[int]:
    return [pid for pid in processes_below(session) if pid != os.getpid()]


def _processes() -> list[int]:
    """Return the ids of this user's processes; empty if there is no /proc."""
    found = []
    for path in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.append(int(path.name))
    return found


def _writes_below(pid: int, folder: Path) -> bool:
    prefix = f"{folder}/"
    with suppress(OSError):
        for link in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()).startswith(prefix) and _writable(pid, link.name):
                    return True
    return False


def _writable(pid: int, descriptor: str) -> bool:
    for line in (_PROC / str(pid) / "fdinfo" / descriptor).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _started(pid: int) -> str:
    """Return when the process started, in clock ticks since boot; empty if there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
