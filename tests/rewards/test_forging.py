"""Programs that want to pass without solving anything. Each is run against tests that a wrong program fails."""

import shutil
from pathlib import Path

import pytest

from actors.rewards import sandbox
from actors.rewards.sandbox import Limits, Trial, run_confined

AMPLE = Limits(timeout_s=20)
SHORT = Limits(timeout_s=2)
SECRET = 918273645
SOURCE = Trial(
    source=f"import math\nassert add(1, 2) == {SECRET}\nassert not add(2, 2) == 5\n"
    f"assert abs(add(0, 0) - {SECRET}) < 1e-6\nassert math.isclose(add(3, 4), {SECRET})\n",
    names=("add",),
)
CALLS = Trial(kind="calls", function="add", cases=(((1, 2), SECRET),), prelude=True)
SCRIPTS = Trial(kind="scripts", cases=(("1 2\n", str(SECRET)),), prelude=True)

ALWAYS_EQUAL = """
class Equal:
    def _yes(self, *_): return True
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = __bool__ = _yes
    def __ne__(self, other): return False
    def _self(self, *_): return self
    __sub__ = __rsub__ = __add__ = __abs__ = __float__ = __index__ = _self
    def __hash__(self): return 0
    def __instancecheck__(self, other): return True
def add(a, b): return Equal()
"""
# Looks for an expected value wherever a program can look; its own source does not hold what it looks for.
TAKE = """
import gc, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals)
        yield repr(list(frame.f_globals.values()))
        frame = frame.f_back
    for o in gc.get_objects():
        if isinstance(o, (dict, list, tuple, str)): yield repr(o)[:100000]
    for pid in ['self', *filter(str.isdigit, os.listdir('/proc'))]:
        for name in ('environ', 'cmdline', 'maps'):
            yield read(f'/proc/{pid}/{name}')
        try: files = os.listdir(f'/proc/{pid}/fd')
        except OSError: continue
        for file in files: yield read(f'/proc/{pid}/fd/{file}')
def read(path):
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        return os.read(file, 1 << 20).decode('latin1')
    except OSError: return ''
wanted = re.compile('91' + '82[0-9]{5}')
def steal():
    for text in texts():
        if match := wanted.search(text): return int(match[0])
    return 0
stolen = steal()
def add(a, b): return stolen or steal()
if __name__ == '__main__': print(stolen)
"""
FORGE_FRAMES = """
import gc, json, os, sys
def tokens():
    for o in gc.get_objects():
        if isinstance(o, dict):
            for key in ('token',):
                if isinstance(o.get(key), str): yield o[key]
    frame = sys._getframe()
    while frame:
        if isinstance(frame.f_locals.get('token'), str): yield frame.f_locals['token']
        frame = frame.f_back
for token in [*tokens(), '']:
    for fd in range(0, 64):
        try: os.write(fd, b'\\n' + json.dumps({'token': token, 'message': ''}).encode() + b'\\n')
        except OSError: pass
os._exit(0)
"""
WRITE_INTO_OTHERS = """
import json, os
line = b'\\n' + json.dumps({'token': 'x', 'message': ''}).encode() + b'\\n'
for process in (os.getppid(), os.getpid() + 1):  # the supervisor and the judge, which was started next
    for file in range(0, 64):
        try: os.write(os.open(f'/proc/{process}/fd/{file}', os.O_WRONLY | os.O_NONBLOCK), line * 2)
        except OSError: pass
def add(a, b): return 0
"""
PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
SEIZE = 0x4206
near = (os.getppid(), *range(os.getpid() + 1, os.getpid() + 4))
reached = [process for process in near if libc.ptrace(SEIZE, process, 0, 0) == 0]
reached += [process for process in near if os.path.isdir('/proc') and os.access(f'/proc/{process}/mem', os.R_OK)]
assert not reached, reached
def add(a, b): return 0
"""
PATCH = """
import builtins, json, math, operator, os, sys, pickle
def yes(*a, **k): return True
for module in (builtins, math, operator):
    for name in ('abs', 'all', 'any', 'isinstance', 'isclose', 'eq', 'sorted', 'set'):
        if hasattr(module, name): setattr(module, name, yes)
json.dumps = lambda *a, **k: '["value", true, []]'
math.isclose = yes
def abs(x): return 0
def add(a, b): return 0
"""
SAYS_TRUE = "import json\njson.dumps = lambda *a, **k: '[\"value\", true, []]'\ndef add(a, b): return 0\nprint(1)"
ATEXIT = "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0\nimport sys; sys.exit(0)"
EXITS = "import os\ndef add(a, b): os._exit(0)\nos._exit(0)"
EXITS_LATER = "import sys\ndef add(a, b): sys.exit(0)"
RAISES = "def add(a, b): raise StopIteration"
STOPS_JUDGE = """
import os, signal
for process in (os.getppid(), os.getpid() + 1):
    try: os.kill(process, signal.SIGTERM)
    except OSError: pass
def add(a, b): return 0
"""
FLOOD = """
import os
for file in range(3, 20):
    try: os.write(file, bytes([255]) * 4096)
    except OSError: pass
def add(a, b): return 0
"""
HUGE = """
import os, struct
def add(a, b):
    for file in range(3, 20):
        try: os.write(file, struct.pack('<Q', 1 << 62))
        except OSError: pass
    return 0
"""
SUBCLASS = """
class N(int):
    __eq__ = lambda self, other: True
    __sub__ = lambda self, other: 0
    __hash__ = int.__hash__
def add(a, b): return N(0)
"""
FLOAT = """
class F(float):
    __eq__ = __lt__ = lambda self, other: True
    __sub__ = __abs__ = lambda self, *other: self
def add(a, b): return F(0)
"""
TESTS_LOOKUP = """
class Text(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def add(a, b): return [Text('x')]
"""
FORK = "import os\nif os.fork() == 0:\n    def add(a, b): return 0\nelse:\n    os._exit(0)"

LIES = {
    "equal to everything": ALWAYS_EQUAL,
    "a number equal to everything": SUBCLASS,
    "a float close to everything": FLOAT,
    "text equal to everything": TESTS_LOOKUP,
    "searches memory and /proc for the answer": TAKE,
    "writes a verdict with any token it finds": FORGE_FRAMES,
    "looks into other processes' descriptors": WRITE_INTO_OTHERS,
    "ptrace": PTRACE,
    "patches what the tests may call": PATCH,
    "answers everything with true": SAYS_TRUE,
    "leaves with success": EXITS,
    "leaves with success when called": EXITS_LATER,
    "leaves through atexit": ATEXIT,
    "raises StopIteration": RAISES,
    "signals its judge": STOPS_JUDGE,
    "floods its descriptors": FLOOD,
    "promises an endless message": HUGE,
    "answers from a fork": FORK,
}


@pytest.fixture(params=["as it is", "without namespaces", "without Landlock", "with neither"])
def system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sandbox as it is here, and as it would be where a layer is not granted."""
    removed = {
        "without namespaces": ("unshare",),
        "without Landlock": ("landlock",),
        "with neither": ("unshare", "landlock"),
    }.get(request.param, ())
    if removed:
        changed = shutil.copytree(sandbox._PACKAGE, tmp_path / "confinement", ignore=shutil.ignore_patterns("*.pyc"))
        source = (changed / "layers.py").read_text()
        for name in removed:
            line = {
                "unshare": "return LINUX and libc.unshare(flags) == 0",
                "landlock": "return version if done else 0",
            }[name]
            assert line in source
            if name == "unshare":
                source = source.replace(line, "return False")
            else:
                before = "    version = libc.syscall(create, None, ctypes.c_size_t(0), 1) if LINUX else -1\n"
                assert before in source
                source = source.replace(before, "    version = -1\n")
        (changed / "layers.py").write_text(source)
        monkeypatch.setattr(sandbox, "_PACKAGE", changed)
    return str(request.param)


@pytest.mark.parametrize("system", ["as it is", "with neither"], indirect=True)
@pytest.mark.parametrize("lie", LIES)
def test_no_program_forges_its_verdict(lie: str, system: str) -> None:
    verdict = run_confined(LIES[lie], SHORT if "endless" in lie or "floods" in lie else AMPLE, SOURCE)
    assert not verdict.passed, lie
    assert not verdict.ungradable, verdict.message
    assert verdict.confinement is not None


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("tests", [CALLS, SCRIPTS], ids=["calls", "scripts"])
def test_nor_against_expected_values_and_outputs(lie: str, tests: Trial) -> None:
    verdict = run_confined(LIES[lie], SHORT if "endless" in lie or "floods" in lie else AMPLE, tests)
    assert not verdict.passed, lie
    assert not verdict.ungradable, verdict.message


def test_neither_judge_nor_supervisor_can_be_looked_into(system: str) -> None:
    """Without namespaces others' processes can have the next numbers; the judge has the program's parent."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nreached = []\n"
        "def judge(process):\n"
        "    try: return open(f'/proc/{process}/stat').read().rsplit(')')[-1].split()[1] == str(os.getppid())\n"
        "    except OSError: return True\n"
        "for process in (os.getppid(), *filter(judge, range(os.getpid() + 1, os.getpid() + 20))):\n"
        "    if libc.ptrace(0x4206, process, 0, 0) == 0: reached.append(('ptrace', process))\n"
        "    for name in ('fd', 'mem', 'environ', 'fd/3', 'fd/4', 'fd/5', 'fd/6'):\n"
        "        try: os.open(f'/proc/{process}/{name}', os.O_RDONLY | os.O_NONBLOCK)\n"
        "        except OSError: continue\n"
        "        reached.append((name, process))\n"
        "assert not reached, reached\n"
    )
    assert run_confined(code, AMPLE).message == ""


def test_the_tests_pass_for_who_solves_them() -> None:
    """The tests above can be passed."""
    code = f"def add(a, b): return {SECRET}\nif __name__ == '__main__': print({SECRET})"
    for tests in (SOURCE, CALLS, SCRIPTS):
        assert run_confined(code, AMPLE, tests).passed


@pytest.mark.parametrize(
    "test", ["f().startswith('a')", "f().issubset({1})", "f().isdigit()", "'a' in f()", "f() >= 1"]
)
def test_no_object_of_the_program_says_itself_that_it_fits(test: str) -> None:
    code = "class A:\n  def __getattr__(self, name): return lambda *a: True\n"
    code += "  __contains__ = __ge__ = lambda self, other: True\ndef f(): return A()"
    verdict = run_confined(code, AMPLE, Trial(source=f"assert {test}", names=("f",)))
    assert not verdict.passed
    assert "Error" in verdict.message


def test_an_object_of_the_program_is_never_told_what_is_expected_of_it() -> None:
    code = "class A:\n  told = []\n  def __eq__(self, o): A.told.append(o); return True\n  __hash__ = None\n"
    code += "  __contains__ = __sub__ = __lt__ = __eq__\n  def __iter__(self): return iter(())\n"
    code += "def f(): return A()\ndef told(): return len(A.told)"
    source = (
        "assert not f() == 7\nassert f() != 7\nassert 7 not in f()\nassert not [f()] == [7]\n"
        "for use in (lambda: f() - 7, lambda: f() < 7):\n"
        "    try: use()\n    except TypeError: pass\n    else: assert False\n"
        "assert told() == 0"
    )
    verdict = run_confined(code, AMPLE, Trial(source=source, names=("f", "told")))
    assert verdict.passed, verdict.message
