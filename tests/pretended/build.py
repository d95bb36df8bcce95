"""Compiles the device's guard with g++ at first use and loads it. Owns the cache: a folder of the machine's temporary
directory, never one of the checkout; its names say which torch, source and compiler a library is of.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")
_STANDARD = "-std=c++20"


def load() -> None:
    """Into this process, before torch: it looks for a device's hooks once. Raises RuntimeError."""
    if "torch" in sys.modules:
        raise RuntimeError("the pretended device must be there before torch: pytest -p tests.pretended.plugin")
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def library() -> Path:
    """The compiled guard; made if it is not there. Raises RuntimeError with the compiler's last lines."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch = Path(spec.origin).parent
    compiler = os.environ.get("CXX", "g++")
    key = "\n".join((importlib.metadata.version("torch"), str(torch), compiler, _SOURCE.read_text(encoding="utf-8")))
    name = f"guard-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    folder = Path(tempfile.gettempdir()) / f"paceline-pretended-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} is another user's: set TMPDIR")
    found = folder / name
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            _compile(compiler, torch, made)
            made.rename(found)  # whole or not at all: others may be compiling too
    return found


def _compile(compiler: str, torch: Path, output: Path) -> None:
    places = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [compiler, _STANDARD, "-O1", "-w", "-shared", "-fPIC", *places, str(_SOURCE), "-o", str(output), *linked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed on {_SOURCE.name}:\n" + "\n".join(done.stderr.splitlines()[-20:]))
