"""The folder of a run on disk. A new run never overwrites an older one of the same name."""

from pathlib import Path


def set_aside(run_dir: Path) -> Path | None:
    """Move an existing run folder to the first free `<name>.N`, and return where it went."""
    if not run_dir.exists():
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(target)
    return target
