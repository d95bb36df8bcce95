"""Detect that the running code belongs to another checkout than the current directory. Changes no import.

An editable install finds its own checkout's packages before those of the current directory or of a job's working
directory. A user who edits one checkout and runs another should not learn it from results.
"""

from pathlib import Path

from launch.errors import OUR_PACKAGES, UsageError

RUNNING = Path(__file__).resolve().parents[2]


def one_tree(here: Path, running: Path = RUNNING) -> None:
    """Raise UsageError if `here` is a checkout of this program with other code than the running one."""
    here = here.resolve()
    if here == running or not all((here / package / "__init__.py").is_file() for package in OUR_PACKAGES):
        return
    if (differs := _first_difference(here, running)) is None:
        return  # such as a job submitted from the installed checkout
    raise UsageError(
        f"the current directory, {here}, is a checkout of Paceline, but the code that runs is in {running}, and "
        f"{differs} differs",
        remedy=f"to run this checkout, install it: pip install -e {here} (for two at once, a virtual environment each: "
        f"make install in both); to run the other, start from {running}, or from a directory without code",
    )


def _first_difference(here: Path, running: Path) -> str | None:
    names = {
        str(file.relative_to(root))
        for root in (here, running)
        for package in sorted(OUR_PACKAGES)
        for file in (root / package).rglob("*.py")
    }
    for name in sorted(names):
        one, other = here / name, running / name
        if not (one.is_file() and other.is_file() and _plain(one) == _plain(other)):
            return name
    return None


def _plain(file: Path) -> bytes:
    """Return a file's text as in a checkout: a wheel has imports below paceline/ (native/wheel_layout.py)."""
    return file.read_bytes().replace(b"from paceline.", b"from ").replace(b"import paceline.", b"import ")
