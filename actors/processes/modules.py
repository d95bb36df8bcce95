"""Where a process that runs a user's code finds the user's modules. Imports none of them."""

import re
import sys
import sysconfig
from pathlib import Path


def folders() -> list[str]:
    """The folders of modules of this process, for a child to search in the same order."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def looked_in(error: str) -> str:
    """What to add to a user's error that names a module which is not there: the folders that were searched. Empty for
    other errors."""
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
