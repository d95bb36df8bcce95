"""The kernels' bits on CPUs that this machine is not: compiled for each, run under qemu-user, compared.

`python -m pytest tests/kernels/test_other_cpus.py` on Debian needs `apt install g++ g++-aarch64-linux-gnu qemu-user`.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("checksums.cpp")
X86 = ("-mavx2", "-mfma", "-DPACELINE_X86_64_V3")  # what CMakeLists.txt compiles every x86-64 kernel for

pytestmark = [pytest.mark.slow, pytest.mark.long]


def _built_by_cmake() -> tuple[list[str], list[str]]:
    """The sources of the kernels' library, and the flags that decide its arithmetic."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    sources = re.search(r"add_library\(paceline_kernels STATIC ([^)]*)\)", text)
    flags = re.search(r"target_compile_options\(paceline_kernels PRIVATE (-O3 [^)]*)\)", text)
    assert sources is not None
    assert flags is not None
    return sources[1].split(), flags[1].split()


def _needs(*programs: str) -> pytest.MarkDecorator:
    """Before anything is compiled in vain: that takes minutes."""
    missing = [program for program in programs if shutil.which(program) is None]
    said = f"{', '.join(missing)} not installed: apt install g++ g++-aarch64-linux-gnu qemu-user"
    return pytest.mark.skipif(bool(missing), reason=said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other_cpus")


@cache
def _program(compiler: str, machine: tuple[str, ...], folder: Path) -> Path:
    """A static program, so that no emulator needs the other machine's libraries."""
    sources, flags = _built_by_cmake()
    program = folder / compiler
    command = [compiler, "-std=gnu++17", *flags, *machine, "-Wno-psabi", "-fopenmp", "-static", f"-I{ROOT / 'native'}"]
    result = subprocess.run(
        [*command, str(PROGRAM), *(str(ROOT / source) for source in sources), "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return program


def _checksums(*command: str) -> dict[str, str]:
    """By kernel and dtype."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, f"{' '.join(command)}: {result.returncode}\n{result.stderr}"
    return dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())


@pytest.fixture
def here(folder: Path) -> dict[str, str]:
    """This machine's, with its AVX2 kernels."""
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("compares with the AVX2 kernels, which this CPU cannot run")
    found = _checksums(str(_program("g++", X86, folder)))
    assert len(found) > 64
    return found


@pytest.mark.timeout(1800)
@_needs("g++", "qemu-x86_64")
def test_a_haswell_computes_the_same_bits(here: dict[str, str], folder: Path) -> None:
    assert _checksums("qemu-x86_64", "-cpu", "Haswell", str(_program("g++", X86, folder))) == here


@pytest.mark.timeout(1800)
@_needs("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
def test_an_aarch64_computes_the_same_bits(here: dict[str, str], folder: Path) -> None:
    found = _checksums("qemu-aarch64", str(_program("aarch64-linux-gnu-g++", (), folder)))
    assert found.keys() == here.keys()
    assert {kernel for kernel in found if found[kernel] != here[kernel]} == set()
