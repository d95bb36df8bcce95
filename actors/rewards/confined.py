"""Runs one untrusted Python program under every limit that the system grants, and says on a pipe whether it ran to its
end. Owns the confinement; run by path as a process of its own (`python -I`), never imported by Paceline.

Process tree: supervisor -> (first process of a new PID namespace ->) program. Killing the supervisor kills the rest.
What each layer is for:
- root becomes `nobody`: a process limit does not bind root, and root may delete anything;
- user, network, PID and IPC namespaces: no network, no other process to see or signal, nothing outlives the program;
- Landlock: files are readable below the interpreter and system library folders, writable in the private folder only;
- resource limits: CPU time, address space, processes, file size, open files, no core files;
- no_new_privs and no capabilities: set-uid programs and the namespaces' own privileges give nothing.
"""

# ruff: noqa: PTH112, PTH116, PTH123, PTH208
# (Every import delays every tested program: no pathlib.)
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
import types
from typing import Any

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
NOBODY = 65534
MESSAGE_CHARS = 500
LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if LINUX:
        libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def pin_import_paths() -> list[int]:
    """Makes imports independent of the permissions of parent folders, which matter once root has become nobody.

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
    """Root becomes nobody, for good. True if the process is not root afterwards."""
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
    """Restricts files (and, by version, TCP and signals) for this process and its children. Returns the version, or 0.

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
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
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
    """Threads of this user, for a process limit that counts them all (outside a user namespace)."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if LINUX else []):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # it has ended
    return count


def set_limits(limits: dict[str, int], *, own_namespace: bool) -> list[str]:
    """Hard resource limits. Returns the names of those that the system refuses."""
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


def explain(error: BaseException) -> str:
    """`ValueError: text (line 3)`, the line being the program's."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
    text = "".join(traceback.format_exception_only(error)).strip()
    return text[-MESSAGE_CHARS:] + (f" (line {lines[-1]})" if lines else "")


def run_program(job: dict[str, Any], report: dict[str, Any], imports: list[int], folder: int, answers: int) -> None:
    """Confines this process, runs the program and writes two lines: the confinement, then the verdict."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    readable: list[int | str] = [*imports, "/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix]
    report["refused_limits"] = set_limits(job["limits"], own_namespace=report["namespaces"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    report["landlock"] = landlock(readable, folder)
    report["capabilities_dropped"] = drop_capabilities()
    os.write(answers, json.dumps(report).encode() + b"\n")

    own_pid = os.getpid()
    token = job.pop("token")
    module = types.ModuleType("candidate")  # a real module: dataclasses and pickle look it up by name
    sys.modules["candidate"] = module
    try:
        exec(compile(job["program"], "<program>", "exec"), module.__dict__)
        verdict = {"token": token, "message": ""}
    except BaseException as error:
        # Out of memory, recursion and exit included: whatever ends the program before its last line has failed.
        verdict = {"token": None, "message": explain(error)}
    if os.getpid() == own_pid:  # not in a fork of the program
        os.write(answers, json.dumps(verdict).encode() + b"\n")


def wait_for(pid: int) -> None:
    """Waits for one child, reaping every orphan that this process inherits."""
    while os.wait()[0] != pid:
        pass


def end_orphans() -> None:
    """Kills all that is left below this process, which inherits every orphan. Only needed without a PID namespace."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as stream:
                children = [int(pid) for pid in stream.read().split()]
        except OSError:
            return  # a kernel without this list: the grader looks for them too
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def main() -> None:
    jobs, answers = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(jobs, "rb") as stream:
        job = json.loads(stream.read())
    imports = pin_import_paths()
    os.chdir(job["folder"])
    os.umask(0o077)
    folder = os.open(".", os.O_RDONLY)  # by descriptor, like the imports: its path may be closed to nobody
    report: dict[str, Any] = {"not_root": drop_root(), "namespaces": new_namespaces()}
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    prctl(PR_SET_SUBREAPER, 1)
    child = os.fork()
    if child == 0 and report["namespaces"]:  # this one is PID 1 of the namespace: when it ends, all in it end
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        child = os.fork()
    if child == 0:
        run_program(job, report, imports, folder, answers)
        os._exit(0)
    os.close(answers)
    wait_for(child)
    if not report["namespaces"]:
        end_orphans()
    os._exit(0)


if __name__ == "__main__":
    main()
