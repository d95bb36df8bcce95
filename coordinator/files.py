"""Files that others must not read, or see half of. Owns how they are written only."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Readable by its owner only from its first byte on; a file that is there is replaced as a whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    beside.replace(path)
