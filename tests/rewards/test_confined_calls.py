"""What a confined program may ask of the kernel, what all its processes may hold, and what it may leave behind: as root
(the program is then nobody) and as an ordinary user (the program is then that user)."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.rewards import describe_confinement
from actors.rewards.confinement.syscalls import MACHINES, REFUSED, program
from actors.rewards.sandbox import Limits, Trial, run_confined
from tests.rewards import as_user

AMPLE = Limits(timeout_s=30, memory_bytes=256 << 20)
Run = Callable[[str], tuple[bool, str]]


@pytest.fixture(params=["this user", "an ordinary user"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs one program; afterwards nothing is left where the private folders are made."""
    folder = tempfile.mkdtemp()  # not tmp_path, whose parents are closed to other users
    Path(folder).chmod(0o755)

    def here(code: str) -> tuple[bool, str]:
        verdict = run_confined(code, AMPLE)
        return verdict.passed, verdict.message

    def as_other(code: str) -> tuple[bool, str]:
        done = subprocess.run(
            [sys.executable, "-m", as_user.__name__, folder, code],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        if done.returncode == as_user.NO_INTERPRETER:
            pytest.skip("no interpreter here can be run by an ordinary user")
        assert done.returncode == 0, done.stderr
        [[passed, message]], left = json.loads(done.stdout)
        assert left == [], done.stderr
        return passed, message

    if request.param == "this user":
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield here
    elif os.geteuid() == 0:
        yield as_other
    else:
        pytest.skip("only root can be somebody else; this user's own test is the other one")
    assert list(Path(folder).iterdir()) == []
    Path(folder).rmdir()


@pytest.fixture
def filtered() -> None:
    got = run_confined("", Limits()).confinement
    assert got is not None
    if not got["seccomp"]:
        pytest.skip("this system grants no seccomp filter")


CONNECT = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
reached = []
for path, kind in {targets!r}:
    address = path.encode() if path[0] != '@' else bytes(1) + path[1:].encode()
    try:
        made = socket.socket(socket.AF_UNIX, kind)
        made.connect(address)
    except OSError: pass
    else: reached.append((path, 'connected'))
    for pair_kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try: left, right = socket.socketpair(socket.AF_UNIX, pair_kind)
        except OSError: continue
        right.setblocking(False)
        for use in (left.connect, lambda to: left.sendto(b'x', to)):
            try: use(address)
            except OSError: continue
            try: right.recv(1)  # the address was not looked at: it went to the other end
            except OSError: reached.append((path, 'through a pair', pair_kind))
    raw = address.ljust(100, bytes(1))
    made = libc.socket(1, int(kind), 0)
    sockaddr = (1).to_bytes(2, 'little') + raw
    if made >= 0 and libc.connect(made, sockaddr, 2 + len(address)) == 0: reached.append((path, 'libc'))
assert not reached, reached
"""


def test_no_unix_socket_can_be_reached(run: Run, filtered: None, request: pytest.FixtureRequest) -> None:
    """Ray's object store and raylet, ssh-agent, docker: whoever has the user's id may connect."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    request.addfinalizer(folder.rmdir)
    targets: list[tuple[str, int]] = []
    for mode in (0o700, 0o777):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            path = folder / f"{mode:o}-{int(kind)}"
            server = socket.socket(socket.AF_UNIX, kind)
            request.addfinalizer(server.close)
            server.bind(str(path))
            path.chmod(mode)
            if os.geteuid() == 0 and "ordinary" in request.node.name:
                os.chown(path, as_user.UID, as_user.UID)
            if kind is socket.SOCK_STREAM:
                server.listen()
            targets.append((str(path), int(kind)))
            with socket.socket(socket.AF_UNIX, kind) as client:
                client.connect(str(path))  # it can be reached from here
            request.addfinalizer(path.unlink)
    abstract = f"paceline-{os.getpid()}"
    server = socket.socket(socket.AF_UNIX)
    request.addfinalizer(server.close)
    server.bind(b"\0" + abstract.encode())
    server.listen()
    targets.append((f"@{abstract}", int(socket.SOCK_STREAM)))
    assert run(CONNECT.format(targets=targets)) == (True, "")


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_there_are_no_sockets_of_any_family(filtered: None, family: str) -> None:
    for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW"):
        verdict = run_confined(f"import socket\nsocket.socket(socket.{family}, socket.{kind})", AMPLE)
        assert "PermissionError: [Errno 13]" in verdict.message


RAW = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
allowed = {}
for number, error in {calls!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, *[ctypes.c_long(-1)] * 6) != -1 or ctypes.get_errno() != error:
        allowed[number] = ctypes.get_errno()
assert not allowed, allowed
"""


def test_what_is_refused_is_refused_by_the_filter(run: Run, filtered: None) -> None:
    column = MACHINES[platform.machine()][1]
    calls = {
        numbers[column]: error for error, table in REFUSED.items() for numbers in table.values() if numbers[column]
    }
    assert len(calls) > 60
    assert run(RAW.replace("{calls!r}", repr(calls))) == (True, "")


@pytest.mark.parametrize(
    "call",
    [
        "libc.unshare(0x10000000)",
        "libc.syscall({clone}, 0x10000011, 0, 0, 0, 0)",  # a user namespace, and its capabilities
        "libc.memfd_create(b'x', 0)",
        "libc.shmget(0, 4096, 0o1777)",
        "libc.ptrace(0, 0, 0, 0)",
        "libc.socketpair(1, 2, 0, ctypes.create_string_buffer(8))",
        "libc.socketpair(1, 0o2002, 0, ctypes.create_string_buffer(8))",  # SOCK_CLOEXEC | SOCK_DGRAM
        "libc.socketpair(16, 1, 0, ctypes.create_string_buffer(8))",
        "libc.syscall({x32}, 41, 1, 1, 0)",
    ],
)
def test_calls_by_their_arguments(filtered: None, call: str) -> None:
    if "x32" in call and platform.machine() != "x86_64":
        pytest.skip("x32 is an interface of x86_64")
    call = call.format(clone=(56, 220)[MACHINES[platform.machine()][1]], x32=0x40000000 + 41)
    code = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nmade = {call}\nif made == 0: os._exit(1)\n"
    verdict = run_confined(code + "assert made == -1 and ctypes.get_errno() in (1, 13, 38), made", AMPLE)
    assert (verdict.passed, verdict.message) == (True, "")


@pytest.mark.parametrize(
    "code",
    [
        "import socket\na, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'",
        "import asyncio\nasync def f(): return await asyncio.sleep(0, 5)\nassert asyncio.run(f()) == 5",
        "import subprocess, sys\nassert subprocess.run(['/bin/echo', 'x'], capture_output=True).stdout == b'x\\n'",
        "from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(2).map(abs, [-1])) == [1]",
        "import multiprocessing as m\na, b = m.Pipe()\np = m.Process(target=a.send, args=(5,))\np.start()\n"
        "assert b.recv() == 5\np.join()",
        "import numpy as np\nassert (np.ones((99, 99)) @ np.ones((99, 99)))[0, 0] == 99",
        "import mmap\nmmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)",
    ],
)
def test_honest_programs_do_not_notice(code: str) -> None:
    verdict = run_confined(code, Limits(timeout_s=30))
    assert (verdict.passed, verdict.message) == (True, "")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_decides_as_its_table_says(machine: str) -> None:
    """The instructions are run here, as linux/filter.h defines them: also for machines that this is not."""
    architecture, column = MACHINES[machine]
    other = next(value[0] for name, value in MACHINES.items() if name != machine)
    steps = [
        (int.from_bytes(raw[:2], sys.byteorder), raw[2], raw[3], int.from_bytes(raw[4:], sys.byteorder))
        for raw in program(machine)
    ]

    def decide(number: int, arguments: tuple[int, ...] = (), arch: int = architecture) -> int:
        data = {0: number, 4: arch, **{16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate(arguments)}}
        value, at = 0, 0
        while True:
            code, yes, no, operand = steps[at]
            at += 1
            match code:
                case 0x20:
                    value = data[operand]
                case 0x54:
                    value &= operand
                case 0x06:
                    return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
                case 0x15:
                    at += yes if value == operand else no
                case 0x35:
                    at += yes if value >= operand else no
                case 0x45:
                    at += yes if value & operand else no
                case _:
                    raise AssertionError(code)

    refused = {numbers[column]: error for error, table in REFUSED.items() for numbers in table.values()}
    clone, pair, mmap = ((56, 53, 9), (220, 199, 222))[column]
    for number in range(500):
        if number not in (clone, pair, mmap):
            assert decide(number) == refused.get(number, 0)
    assert decide(0, arch=other) == decide(0, arch=0x40000003) == 1
    assert (decide(0x40000000 + 1) != 0) == (machine == "x86_64")
    assert [decide(clone, (flags,)) for flags in (0x1200011, 0x3D0F00, 0x10000011, 0x20000, 0x40000000)] == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert [decide(pair, given) for given in ((1, 1), (1, 5), (1, 0o2004001), (1, 2), (1, 3), (16, 1))] == [
        0, 0, 0, 13, 13, 13,
    ]  # fmt: skip
    private, shared, file, checked = 0x22, 0x21, 0x01, 0x23
    assert [decide(mmap, (0, 1, 3, flags)) for flags in (private, shared, file, checked)] == [0, 1, 0, 1]


HOARD = """
import mmap, os, time
def hoard():
    {how}
    time.sleep(20)
for _ in range(12):
    if os.fork() == 0:
        hoard()
        os._exit(0)
time.sleep(20)
"""


@pytest.mark.parametrize(
    "how",
    [
        "kept = bytearray(150 << 20)",
        "kept = mmap.mmap(-1, 150 << 20, flags=mmap.MAP_PRIVATE); kept[::4096] = bytes(38400)",
    ],
)
def test_memory_is_bounded_over_all_processes(run: Run, how: str) -> None:
    """Each of the twelve stays below memory_bytes; together they would hold seven times as much."""
    got = run_confined("", Limits()).confinement
    assert got is not None
    if not got["memory_summed"]:
        pytest.skip("this system does not list the children of a process")
    passed, message = run(HOARD.format(how=how))
    assert (passed, message) == (False, "its processes together held more than 512 MiB of memory")


def test_memory_that_forks_share_counts_once() -> None:
    code = "import os, time\nkept = bytearray(100 << 20)\npids = []\nfor _ in range(8):\n    pids.append(os.fork())\n"
    code += "    if pids[-1] == 0:\n        time.sleep(1)\n        os._exit(0)\nfor pid in pids: os.waitpid(pid, 0)"
    verdict = run_confined(code, AMPLE)
    assert (verdict.passed, verdict.message) == (True, "")


def test_memory_of_no_process_is_refused(filtered: None) -> None:
    for code in (
        "import mmap; mmap.mmap(-1, 4096)",
        "import os; os.memfd_create('x')",
        "import mmap; mmap.mmap(open('/dev/zero', 'r+b').fileno(), 4096)",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 4096, 0o1777) != -1",
    ):
        assert not run_confined(code, AMPLE).passed, code


NESTED = "import os\nfor _ in range(1200):\n    os.mkdir('x')\n    os.chdir('x')\nopen('f', 'w').close()\n"
LOCKED = "import os\nos.makedirs('a/b')\nos.symlink('/', 'a/b/link')\nos.mkfifo('a/b/fifo')\nopen('a/f', 'w').close()\n"
LOCKED += "os.chmod('a/b', 0)\nos.chmod('a', 0)\nos.chmod('.', 0)\n"
WIDE = "import os\nfor i in range(40):\n    os.makedirs(f'{i}/{i}/x')\n"
WIDE += "    for j in range(9): open(f'{i}/{i}/{j}', 'w').close()\n"


@pytest.mark.parametrize("mess", [NESTED, LOCKED, WIDE], ids=["nested", "locked", "wide"])
def test_what_a_program_leaves_neither_stays_nor_changes_its_verdict(run: Run, mess: str) -> None:
    """The fixture looks that nothing is left."""
    assert run(mess + "assert 1 == 2") == (False, f"AssertionError (line {mess.count(chr(10)) + 1})")
    assert run(mess) == (True, "")


def test_a_folder_that_cannot_be_removed_does_not_change_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "rmdir", refuse)
    verdict = run_confined("assert f(1) == 2", AMPLE, Trial(source="assert True"))
    monkeypatch.undo()
    assert (verdict.passed, "NameError" in verdict.message) == (False, True)
    assert "left behind" in caplog.text


def test_what_is_said_is_what_holds() -> None:
    covered, not_covered = describe_confinement()
    got = run_confined("", Limits()).confinement
    assert got is not None
    assert any("sockets" in text for text in (covered if got["seccomp"] else not_covered))
    assert any("together" in text for text in (covered if got["memory_summed"] else not_covered))
    assert any("Unix socket" in text for text in not_covered) != got["seccomp"]
