"""A CUDA driver of empty functions: Triton compiles its kernels for an H100 and launches them, and nothing runs.

What remains is the host's own time: plans, Triton's launcher, torch's calls. Needs gcc; changes this process for good.
"""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

_ANSWERS = {  # functions that give more than success
    "cuDeviceGetAttribute": "(int *value, int what, int device) { *value = 232448; return 0; }",
    "cuFuncGetAttribute": "(int *value, int what, void *function) { *value = 1024; return 0; }",
    "cuGetErrorString": '(int error, const char **text) { *text = "none"; return 0; }',
}


def install(folder: Path) -> None:
    """Build the driver in `folder`, and make it Triton's. Raises CalledProcessError where gcc fails."""
    asked = (Path(nvidia.__file__).parent / "driver.c").read_text(encoding="utf-8")
    names = set(re.findall(r"\bcu[A-Z]\w+(?=\s*\()", asked))
    names |= {"cuLaunchKernelEx", "cuOccupancyMaxActiveClusters", "cuTensorMapEncodeTiled"}
    body = "\n".join(f"int {name}{_ANSWERS.get(name, '() { return 0; }')}" for name in sorted(names | set(_ANSWERS)))
    source, library = folder / "empty.c", folder / "libcuda.so.1"
    source.write_text(body + "\n", encoding="utf-8")
    flags = ("-O2", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1")
    subprocess.run(("gcc", *flags, "-o", str(library), str(source)), check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # what Triton's part in C asks for by this name
    knobs.nvidia.libcuda_path = str(folder)
    driver.set_active(EmptyDriver())


class EmptyDriver(nvidia.CudaDriver):  # type: ignore[misc]
    """Device 0 is an H100, on its default stream."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
