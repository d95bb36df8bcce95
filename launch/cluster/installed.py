"""The versions installed where this process runs.

Owns the reading only. Nothing here imports torch, Ray or the native extension, so it costs milliseconds in the driver
and on every node.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from launch.errors import OUR_PACKAGES

NONE = "none"
_ROOT = Path(__file__).resolve().parents[2]
_DIGITS = 12  # of a hash: enough to tell two installations apart


def installed() -> dict[str, str]:
    """Return the versions that must be equal across a run, by name.

    Python by minor version, since patch releases work together (Ray's own check, at `ray start`, is stricter). torch by
    public version, since a head without a GPU may have the CPU build.
    """
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "Ray": _version("ray"),
        "torch": _version("torch").partition("+")[0],
        "Paceline": _version("paceline"),
        "Paceline's code": code(_ROOT, sorted(OUR_PACKAGES)),
        "Paceline's native extension": native_stamp(),
    }


def code(root: Path, packages: Sequence[str]) -> str:
    """Return a hash of the names and contents of the Python files of `packages`, directories below `root`."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def native_stamp() -> str:
    """Return the stamp of the sources that the extension was built from, written by its build (CMakeLists.txt)."""
    spec = find_spec("paceline_native")
    if spec is None or spec.origin is None:
        return NONE
    try:
        return (Path(spec.origin).parent / "paceline_native.stamp").read_text(encoding="ascii").strip()
    except OSError:
        return "without a stamp"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NONE
