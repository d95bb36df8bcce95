"""Programs that try to get out, to stay, to take everything or to lie. Each is bounded if the confinement fails."""

import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from actors.rewards import describe_confinement, sandbox
from actors.rewards.sandbox import Limits, Verdict, run_confined

SHORT = Limits(timeout_s=1.5)  # for what shall time out
AMPLE = Limits(timeout_s=30, memory_bytes=256 << 20)  # for all else: this machine may be busy


@pytest.fixture(scope="module")
def confinement() -> dict[str, object]:
    got = run_confined("", Limits()).confinement
    assert got is not None, "the confined interpreter does not start"
    return got


def run(program: str, limits: Limits = AMPLE) -> Verdict:
    return run_confined(program, limits)


@pytest.mark.parametrize(
    "program",
    [
        "",
        "assert 1 + 1 == 2",
        "print('x' * 10_000_000)",  # output is discarded, at no memory
        "import math, json, random, re, collections, datetime, decimal, itertools, typing",
        "import encodings.idna, importlib.metadata, xml.etree.ElementTree",  # late imports below loaded packages
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nassert A(1).x == 1",
        "open('mine', 'w').write('x'); assert open('mine').read() == 'x'",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import os; assert not [k for k in os.environ if 'TOKEN' in k or 'KEY' in k or k == 'USER']",
        "import sys; assert sys.stdin.read() == ''",
        "import os\npid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)",
    ],
)
def test_honest_programs_pass(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    verdict = run(program)
    assert (verdict.passed, verdict.message) == (True, "")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("x = 1\nassert x == 2", "AssertionError (line 2)"),
        ("def f(:\n  pass", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no (line 1)"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "ended before its last line"),
        ("import os; os.abort()", "ended before its last line"),
        ("import os; os.kill(os.getpid(), 9)", "ended before its last line"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import ctypes; ctypes.string_at(0)", "ended before its last line"),
        ("while True: pass", "timed out after 1.5 s"),
        ("import time; time.sleep(1000)", "timed out after 1.5 s"),
        ("while True: print('x' * 1000)", "timed out after 1.5 s"),
        ("raise ValueError('x' * 10_000_000)", "xxx"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(' ' * 1_000_000 + str(len(x)))", "MemoryError"),
    ],
)
def test_failures_and_their_reason(program: str, words: str) -> None:
    verdict = run(program, SHORT if "timed out" in words else AMPLE)
    assert not verdict.passed
    assert words in verdict.message
    assert len(verdict.message) <= 1000


def _write_everywhere(text: bytes) -> str:
    return f"import os\nfor fd in range(1, 64):\n    try: os.write(fd, {text!r})\n    except OSError: pass\nos._exit(0)"


@pytest.mark.parametrize(
    "lie",
    [
        "print('ok'); print('passed'); raise SystemExit(0)",
        _write_everywhere(b'{"token": ""}\n'),
        _write_everywhere(b'{"token": null}\n{}\n'),
        _write_everywhere(b"\xff\xfe\n[]\n"),
        "import os\nif os.fork() == 0:\n    pass\nelse:\n    os._exit(0)",
        "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\nos._exit(0)",
    ],
)
def test_success_cannot_be_printed(lie: str) -> None:
    assert not run(lie).passed


def _named(mark: str) -> str:
    """Source that names its process, and so all that it forks."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\n"


def _living(mark: str) -> list[str]:
    """Processes of that name that do not end within five seconds."""
    deadline = time.monotonic() + 5
    while True:
        living = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "comm").read_text().strip() == mark:
                    living.append(folder.name)
            except OSError:
                continue  # it has ended
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.02)


@pytest.fixture(params=["as it is", "without namespaces"])
def system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sandbox as it is here, and as it would be where namespaces are not granted."""
    if request.param == "without namespaces":
        changed = shutil.copytree(sandbox._PACKAGE, tmp_path / "confinement", ignore=shutil.ignore_patterns("*.pyc"))
        source = (changed / "layers.py").read_text()
        granted = "return LINUX and libc.unshare(flags) == 0"
        assert granted in source
        (changed / "layers.py").write_text(source.replace(granted, "return False"))
        monkeypatch.setattr(sandbox, "_PACKAGE", changed)
    return str(request.param)


def test_fork_bombs_end_and_leave_nothing(system: str) -> None:
    # Bounded: at most 300 processes if no limit holds, each asleep for 30 s.
    mark = f"bomb{os.getpid()}"
    verdict = run(
        _named(mark) + "opened = 0\ntry:\n    for _ in range(300):\n"
        "        if os.fork() == 0:\n            time.sleep(30); os._exit(0)\n        opened += 1\n"
        "except OSError: pass\nassert 0 < opened < 100, opened"
    )
    assert (verdict.passed, verdict.message) == (True, "")
    assert _living(mark) == []


@pytest.mark.parametrize("ending", ["", "time.sleep(30)", "os._exit(0)"])
def test_a_daemon_does_not_outlive_its_program(system: str, ending: str) -> None:
    mark = f"daemon{os.getpid()}"
    daemon = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(30)\n    os._exit(0)\n"
    # Without a verdict (os._exit) the deadline ends it.
    verdict = run(_named(mark) + daemon + "time.sleep(0.2)\n" + ending, SHORT if ending else AMPLE)
    assert verdict.passed == (ending == "")
    assert _living(mark) == []


def test_files_are_bounded() -> None:
    assert "File too large" in run("open('big', 'wb').write(b'x' * (64 << 20))").message
    assert "Too many open files" in run("x = [open('/dev/null') for _ in range(1000)]").message


def test_the_network_is_out_of_reach(confinement: dict[str, object]) -> None:
    if not confinement["namespaces"] and int(str(confinement["landlock"])) < 4:
        pytest.skip("this system grants neither a network namespace nor Landlock 4")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # it can be reached from here
        verdict = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
    assert not verdict.passed
    assert any(words in verdict.message for words in ("unreachable", "ermission denied", "refused"))


def test_other_files_cannot_be_read_or_changed(confinement: dict[str, object], request: pytest.FixtureRequest) -> None:
    if not confinement["landlock"]:
        pytest.skip("this system has no Landlock")
    folder = Path(tempfile.mkdtemp())  # not tmp_path, whose parents are closed to other users anyway
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o777)
    victim = folder / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    for attempt in (
        f"open({str(victim)!r}).read()",
        f"open({str(victim)!r}, 'w').write('gone')",
        f"import os; os.remove({str(victim)!r})",
        f"import os; os.rename({str(victim)!r}, {str(folder / 'new')!r})",
        f"open({str(folder / 'new')!r}, 'w').write('x')",
        f"import os; os.listdir({str(folder)!r})",
        f"import os; os.truncate({str(victim)!r}, 0)",
    ):
        verdict = run(attempt)
        assert not verdict.passed, attempt
        assert "PermissionError" in verdict.message or "FileNotFoundError" in verdict.message
    assert victim.read_text() == "precious"
    assert sorted(p.name for p in folder.iterdir()) == ["victim"]


def test_other_processes_cannot_be_signalled(confinement: dict[str, object]) -> None:
    if not confinement["namespaces"] and int(str(confinement["landlock"])) < 6:
        pytest.skip("this system grants neither a PID namespace nor Landlock 6")
    verdict = run(f"import os; os.kill({os.getpid()}, 0)")
    assert not verdict.passed
    assert "ProcessLookupError" in verdict.message or "PermissionError" in verdict.message


def test_root_is_never_the_user(confinement: dict[str, object]) -> None:
    assert confinement["not_root"]
    assert run("import os; assert os.geteuid() != 0").passed
    assert not run("import os; os.setuid(0)").passed


def test_private_folders_are_removed_even_when_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    verdict = run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)")
    assert verdict.passed, verdict.message
    assert list(tmp_path.iterdir()) == []


def test_many_at_once_keep_their_own_verdicts() -> None:
    verdicts: dict[int, Verdict] = {}

    def work(n: int) -> None:
        verdicts[n] = run(f"assert {n} % 2 == 0, {n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: v.passed for n, v in verdicts.items()} == {n: n % 2 == 0 for n in range(8)}


def test_what_is_not_covered_is_said(confinement: dict[str, object]) -> None:
    covered, not_covered = describe_confinement()
    assert any("kernel bug" in text for text in not_covered)
    network = any("no network" in text for text in covered)
    assert network == bool(confinement["namespaces"])
    assert any("Landlock" in text for text in (covered if confinement["landlock"] else not_covered))
