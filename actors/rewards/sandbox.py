"""Runs untrusted programs and their tests, confined, with a deadline. Owns the processes, their private folder and its
removal. The package confinement owns what happens inside; `describe_confinement` reports what it does not cover.

A program passes if the judge has run every test to its end. The judge is a separate process, so the program's
interpreter holds nothing, and no descriptor, from which a verdict could be made.
"""

import json
import logging
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).with_name("confinement")
# The package is run by its folder, without its parents, whose imports would delay every graded program.
_START = (
    "import sys, types; package = types.ModuleType('confinement'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['confinement'] = package; from confinement.main import main; main()"
)
_NAMESPACES = b'"namespaces": true'
_MAX_ANSWER_BYTES = 65_536
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MOVED = f"moved-{secrets.token_hex(8)}-"  # no program can guess it, so it never collides with a program's own name
_START_S = 5.0  # allowance for starting the interpreter on a busy machine; the program's own time is separate


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one program."""

    timeout_s: float = 10.0  # wall clock; CPU time gets the same, rounded up
    memory_bytes: int = 1 << 30  # address space of each process; twice as much for all of them together
    processes: int = 32  # processes and threads
    file_bytes: int = 16 << 20  # per file
    files: int = 128  # open at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Tests of a program. `kind` says which of the fields are used; without tests, it must run to its last line.

    - source: statements of the tests that assert, run by the judge; `names` of the program that they use, names that
      they use without an import (`borrowed`: name, and `module` or `module:attribute`), and a `stub` whose definitions
      are the judge's own.
    - calls: (arguments, expected value) each, of `function`, or of that method of the program's class Solution.
    - scripts: (standard input, expected output) each.
    """

    kind: Literal["source", "calls", "scripts"] = "source"
    source: str = ""
    stub: str = ""
    names: tuple[str, ...] = ()
    borrowed: tuple[tuple[str, str], ...] = ()
    function: str = ""
    method: bool = False
    cases: tuple[tuple[Any, Any], ...] = ()
    prelude: bool = False  # the program may use the names that public solutions use without an import


@dataclass(frozen=True, slots=True)
class Verdict:
    """`message` says why a program failed, in its own words where it raised."""

    passed: bool
    message: str
    confinement: dict[str, Any] | None  # the child's report; None if it did not get that far
    ungradable: bool = False  # the tests cannot be run: no fault of the program


NO_TRIAL = Trial()


def run_confined(code: str, limits: Limits, tests: Trial = NO_TRIAL) -> Verdict:
    """Run Python source against its tests. Only scripts get standard input, and only their output is kept.
    Thread-safe."""
    token = secrets.token_hex(16)
    bounds = {
        "cpu_s": int(limits.timeout_s) + 1,
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "file_bytes": limits.file_bytes,
        "files": limits.files,
    }
    program = {"code": code, "prelude": tests.prelude, "limits": bounds}
    job = {"token": token, "limits": bounds, **{name: getattr(tests, name) for name in Trial.__slots__}}
    with _private_folder() as folder:
        with tempfile.TemporaryFile() as codes, tempfile.TemporaryFile() as jobs:
            for file, content in ((codes, program), (jobs, job)):
                file.write(json.dumps(content).encode())
                file.seek(0)
            answers, child_answers = os.pipe()
            given = (codes.fileno(), jobs.fileno(), child_answers)
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-B",
                        "-c",
                        _START,
                        str(_PACKAGE),
                        *map(str, given),
                        folder,
                        str(limits.memory_bytes),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(folder),
                    pass_fds=given,
                    start_new_session=True,
                )
            except BaseException:
                os.close(answers)
                raise
            finally:
                os.close(child_answers)
        lines, timed_out = [b""], False
        try:
            lines, timed_out = _read_answers(answers, process, limits.timeout_s)
        finally:
            os.close(answers)
            _kill_tree(process, namespaces=_NAMESPACES in lines[0])
    return _verdict(lines, timed_out, token, limits.timeout_s)


def describe_confinement() -> tuple[list[str], list[str]]:
    """Return (what is confined, what is not) on this machine, measured by running an empty program."""
    got = run_confined("", Limits()).confinement
    if got is None:
        return [], ["the confined interpreter does not start on this machine: code cannot be graded"]
    refused = got["refused_limits"]
    layers = {
        "limits on CPU time, address space, processes, file size, open files and core files": not refused,
        "runs as an ordinary user (root becomes nobody)": got["not_root"],
        "no network, own process ids (user, network, PID and IPC namespaces)": got["namespaces"],
        "files: writes only in a private folder, reads only there and below the interpreter and system libraries "
        f"(Landlock, version {got['landlock']})": got["landlock"] > 0,
        "no capabilities, no new privileges": got["capabilities_dropped"],
        "system calls: no sockets of any family, no tracing, io_uring, BPF, keys, namespaces, mounts, and no memory "
        "that is charged to no process (seccomp)": got["seccomp"],
        "the memory of all processes together: twice memory_mb, sampled every 20 ms": got["memory_summed"],
    }
    never = [
        "a kernel bug in a system call that Python itself needs is reachable",
        "the number and total size of files in the private folder is not limited, only the size of each",
        "where tests only compare objects of one class that the program itself made, they compare as the program says",
    ]
    if not got["seccomp"]:
        never.append(
            "Unix sockets that are files: a program may connect to those of its user (as root: to those open to all)"
        )
        never.append("memory that is resident in no process (memfd, SysV segments, shared mappings) is not limited")
    if not got["memory_summed"]:
        never.append("memory is limited for each process only: 32 times memory_mb together")
    if not got["seccomp"] and not got["namespaces"]:
        never.append(
            "the network" + (": this Landlock version does not cover it" if got["landlock"] < 4 else ", but TCP")
        )
    if not got["namespaces"] and got["landlock"] < 6:
        never.append("a program may signal this user's other processes, and detach one that outlives it")
    missing = [f"unavailable here: {text}" for text, present in layers.items() if not present]
    missing += [f"refused by the system: {name}" for name in refused]
    return [text for text, present in layers.items() if present], missing + never


def _environment(folder: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # numerical libraries would start a thread per core, against the process limit
        "OPENBLAS_NUM_THREADS": "1",
    }


@contextmanager
def _private_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="paceline-code-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)  # nobody, which the program becomes
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Remove a tree in any state: folders without permissions, or nested beyond any recursion.

    Works by descriptors and follows no link. Moves each folder up into the first one before emptying it, so that the
    depth of the tree and the length of its paths do not matter. Raises nothing: the verdict is known.
    """
    try:
        above, name = os.path.split(folder)
        parent = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _unlock(name, parent)
            top = os.open(name, _FOLDER, dir_fd=parent)
            try:
                _empty(top)
            finally:
                os.close(top)
            os.rmdir(name, dir_fd=parent)
        finally:
            os.close(parent)
    except OSError as error:
        _log.warning("%s is left behind, remove it by hand: %s", folder, error)


def _empty(top: int) -> None:
    """Remove the contents of the open folder `top`."""
    moved = 0
    open_ends = [_unlink_files(top)]
    while open_ends:
        for name in open_ends.pop():
            inner = os.open(name, _FOLDER, dir_fd=top)
            try:
                below = []
                for folder in _unlink_files(inner):
                    moved += 1
                    below.append(f"{_MOVED}{moved}")
                    os.rename(folder, below[-1], src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
            if below:
                open_ends.append(below)


def _unlink_files(folder: int) -> list[str]:
    """Remove the files of an open folder; return its folders, made accessible."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _unlock(entry.name, folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def _unlock(name: str, parent: int) -> None:
    """Make a folder readable and writable; never follow a link in its place."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    found = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{found}").chmod(0o700)
    finally:
        os.close(found)


def _read_answers(answers: int, process: subprocess.Popen[bytes], timeout_s: float) -> tuple[list[bytes], bool]:
    """Read lines until the second one, the end of the process or the deadline, which counts from the first line."""
    received = b""
    deadline = time.monotonic() + timeout_s + _START_S
    started = False
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    while received.count(b"\n") < 2 and len(received) < _MAX_ANSWER_BYTES:
        if not started and b"\n" in received:
            started, deadline = True, time.monotonic() + timeout_s
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return received.split(b"\n"), True
        ended = process.poll() is not None  # before reading the pipe, so that none of its output is missed
        # A grandchild may hold the pipe open: do not wait for its end only.
        if poll.poll(0 if ended else min(remaining_s, 0.1) * 1000):
            part = os.read(answers, 65_536)
            if not part:
                break
            received += part
        elif ended:
            break
    return received.split(b"\n"), False


def _verdict(lines: list[bytes], timed_out: bool, token: str, timeout_s: float) -> Verdict:
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except ValueError:
            parsed.append(None)  # an unfinished line, or noise written by the program
    confinement = parsed[0] if parsed and isinstance(parsed[0], dict) else None
    answer = parsed[1] if len(parsed) > 1 and isinstance(parsed[1], dict) else None
    if timed_out:
        return Verdict(False, f"timed out after {timeout_s:g} s", confinement)
    if answer is None:
        return Verdict(False, "the judge was killed by a limit, or by the program", confinement)
    passed = secrets.compare_digest(str(answer.get("token")), token)
    message = "" if passed else str(answer.get("message"))[:1000]
    return Verdict(passed, message, confinement, bool(answer.get("ungradable")))


def _kill_tree(process: subprocess.Popen[bytes], *, namespaces: bool) -> None:
    """End the supervisor and everything below it.

    With a PID namespace, ending the supervisor is enough. Without one, the supervisor adopts every orphan, so the tree
    below it is complete. Kill it repeatedly until a fork bomb has lost the race, and the supervisor last.
    """
    for _ in range(0 if namespaces else 100):
        if process.poll() is not None or not _kill_below(process.pid):
            break
    process.kill()
    process.wait()


def _kill_below(pid: int) -> int:
    """Kill the living descendants of a process; return how many there were."""
    killed = 0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    killed += 1
    except psutil.Error:
        return 0
    return killed
