"""Search paths of the user's modules, for processes that run a user's code. Imports none of them."""

import re
import sys
import sysconfig
from pathlib import Path


def folders() -> list[str]:
    """Return this process's module search path, for a child to use in the same order."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def looked_in(error: str) -> str:
    """Return the searched folders, to be added to a user's ModuleNotFoundError; empty for other errors."""
    if not error.startswith("ModuleNotFoundError"):
        return ""
    if file := re.search(r"'(\w+)\.py'; '\1' is not a package", error):
        return f"; a module goes without its ending: write {file[1]}:NAME"
    python = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = dict.fromkeys(entry for entry in folders() if Path(entry).is_dir() and not _below(Path(entry), python))
    named = ", ".join(own) or "no folder"
    return f"; looked in {named} and among what is installed: put the module into one of these folders, or install it"


def _below(folder: Path, others: set[Path]) -> bool:
    return any(folder.resolve().is_relative_to(other) for other in others)
