"""Ray's processes on this machine: those that serve this node, and those that a private head leaves behind. Owns how
they are recognised.

A driver that is killed takes its head's servers with it, but not their agents: some 200 MB, for good. A private head's
session folder is marked with the driver; the next start of a head ends what still belongs to folders whose driver is
gone. To belong means: of this user, and with a file below the folder open for writing (titles of Ray's processes tell
nothing, and who merely reads a log is not touched).

A private head's servers get sessions of their own, so that a signal to the driver's process group (Ctrl-C, `timeout`)
reaches the driver only. They still end with the driver: Ray asks the kernel for that, and sessions do not matter to it.
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

_detaching: set[int] = set()  # threads whose new processes begin a session


def _detach() -> None:
    if threading.get_ident() in _detaching:
        os.setsid()


os.register_at_fork(after_in_child=_detach)


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Let processes that this thread forks in the block begin a session each: those of os.fork() and of subprocess with
    a `preexec_fn`, which is how Ray starts its servers (ray/_private/services.py, start_ray_process). It is done in the
    fork because a process that runs another program already cannot be moved."""
    _detaching.add(threading.get_ident())
    try:
        yield
    finally:
        _detaching.discard(threading.get_ident())


def servers_of(node_id: str) -> dict[str, int]:
    """Process ids of the raylet of that node and, if it is the head, of the GCS; as far as they are on this machine."""
    arguments = {"raylet": f"--node_id={node_id}", "gcs_server": f"--node-id={node_id}"}
    found = {}
    for path in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            name = (path / "comm").read_text().strip()
            if name in arguments and arguments[name].encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found[name] = int(path.name)
    return found


def mark(session: Path) -> None:
    """This process drives the head whose folder that is."""
    (session / MARK).write_text(f"{os.getpid()} {_started(os.getpid())}\n", encoding="ascii")


def sweep(root: Path) -> int:
    """End what heads below `root` left behind whose drivers are gone; how many processes."""
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
    """SIGKILL to all that belong to a session's folder but this process; how many."""
    found = _others(session)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def end_processes_afterwards(session: Path) -> None:
    """The same, as soon as this process is over, by another one: a call into Ray that waits for its raylet ends this
    process at once when the raylet goes, with Ray's own exit code."""
    command = [sys.executable, "-I", "-S", "-c", _AFTERWARDS, *map(str, (os.getpid(), *_others(session)))]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def processes_below(folder: Path) -> list[int]:
    """Processes of this user with a file below the folder open for writing."""
    resolved = folder.resolve()
    return [pid for pid in _processes() if _writes_below(pid, resolved)]


def _others(session: Path) -> list[int]:
    return [pid for pid in processes_below(session) if pid != os.getpid()]


def _processes() -> list[int]:
    """Of this user; none where the system does not say."""
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
    """When the process started, in clock ticks since boot; empty if there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
