"""Files that survive a crash of the machine. Knows nothing of what is in them; no torch."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
