"""The layers that confine an untrusted program, each as far as the system grants it. Owns what they are; main.py
decides which process gets them, and when.

- root becomes `nobody`: a process limit does not bind root, and root may delete anything;
- user, network, PID and IPC namespaces: no network, no other process to see or signal, nothing outlives the program;
- Landlock: files are readable below the interpreter and system library folders, writable in the private folder only,
  and no process outside can be traced;
- resource limits: CPU time, address space, processes, file size, open files, no core files;
- seccomp (syscalls.py): no sockets, no tracing, no io_uring, no memory that is charged to no process;
- no_new_privs and no capabilities: set-uid programs and the namespaces' own privileges give nothing.
"""

# ruff: noqa: PTH112, PTH116, PTH208
# (Every import delays every graded program: no pathlib.)
import ctypes
import os
import resource
import signal
import sys
from typing import Any

from .syscalls import refuse_system_calls

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
NOBODY = 65534
LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if LINUX:
        libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def pin_import_paths() -> list[int]:
    """Make imports independent of the permissions of parent folders, which matter once root has become nobody.

    Returns the descriptors of the folders, which stay open.
    """
    pinned: dict[str, str] = {}
    folders = []
    for path in [p for p in sys.path if os.path.isdir(p)]:
        folders.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        pinned[path] = f"/proc/self/fd/{folders[-1]}"
    if os.path.isdir("/proc/self/fd"):
        sys.path[:] = [pinned.get(path, path) for path in sys.path]
        by_length = sorted(pinned, key=len, reverse=True)
        for module in list(sys.modules.values()):
            for i, folder in enumerate(getattr(module, "__path__", [])):
                root = next((p for p in by_length if folder.startswith(p + "/")), None)
                if root is not None:
                    module.__path__[i] = pinned[root] + folder[len(root) :]
    return folders


def drop_root() -> bool:
    """Turn root into nobody, permanently. True if the process is not root afterwards."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except (OSError, AttributeError):
            return False
        prctl(PR_SET_DUMPABLE, 1)  # else /proc/self/fd would belong to root
    return True


def new_namespaces() -> bool:
    flags = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
    return LINUX and libc.unshare(flags) == 0


def landlock(readable: list[int | str], folder: int) -> int:
    """Restrict files (and, by version, TCP and signals) for this process and its children. Returns the version, or 0.

    Structures and rights: linux/landlock.h.
    """
    create, add_rule, restrict = 444, 445, 446  # the same numbers on every architecture
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1) if LINUX else -1
    if version < 1:
        return 0
    execute, write_file, read_file, read_dir = 1, 2, 4, 8
    handled = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    network = 3 if version >= 4 else 0  # TCP bind and connect
    scoped = 3 if version >= 6 else 0  # abstract unix sockets and signals to processes outside
    attributes = (ctypes.c_uint64 * 3)(handled, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(create, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return 0

    def allow(target: int | str, rights: int) -> None:
        try:
            parent = os.open(target, getattr(os, "O_PATH", 0)) if isinstance(target, str) else target
        except OSError:
            return
        rule = (rights & handled).to_bytes(8, "little") + parent.to_bytes(4, "little", signed=True)
        libc.syscall(add_rule, ruleset, 1, ctypes.c_char_p(rule), 0)
        if isinstance(target, str):
            os.close(parent)

    for target in readable:
        allow(target, execute | read_file | read_dir)
    for device in ("/dev/null", "/dev/urandom"):  # not zero: mapped, it is memory that is charged to no process
        allow(device, read_file | write_file)
    allow("/etc/ld.so.cache", read_file)
    allow(folder, handled & ~execute)
    done = libc.syscall(restrict, ruleset, 0) == 0
    os.close(ruleset)
    return version if done else 0


def drop_capabilities() -> bool:
    number = SYS_CAPSET.get(os.uname().machine) if LINUX else None
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    return number is not None and libc.syscall(number, header, (ctypes.c_uint32 * 6)()) == 0


def tasks_of_user() -> int:
    """Count this user's threads, for a process limit that includes them all (outside a user namespace)."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if LINUX else []):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # it has ended
    return count


def set_limits(limits: dict[str, int], *, own_namespace: bool) -> list[str]:
    """Set hard resource limits. Returns the names of those that the system refuses."""
    processes = limits["processes"] + (0 if own_namespace else tasks_of_user())
    wanted = {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_NPROC": processes,
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": limits["files"],
        "RLIMIT_CORE": 0,
    }
    refused = []
    for name, value in wanted.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (OSError, ValueError):
            refused.append(name)
    return refused


def confine(limits: dict[str, int], imports: list[int], folder: int, *, own_namespace: bool) -> dict[str, Any]:
    """Confine this process and its children by the layers that need no new process; return what was granted."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    readable: list[int | str] = [*imports, "/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix]
    refused = set_limits(limits, own_namespace=own_namespace)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    granted = landlock(readable, folder)
    dropped = drop_capabilities()
    filtered = refuse_system_calls()  # last: it refuses calls that the others need
    return {"refused_limits": refused, "landlock": granted, "capabilities_dropped": dropped, "seccomp": filtered}
