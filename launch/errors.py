"""Failures that a user can cause or fix: a message with the culprit and a remedy, shown without a traceback.

Lower layers cannot import this module; they raise exception classes of their own. `as_expected` decides which
exceptions are expected: a PacelineError, any exception class defined in one of our packages, and OSError.
"""

import sys
from pathlib import Path

from models.durable import FULL, room

OUR_PACKAGES = frozenset(
    {"actors", "config", "contracts", "coordinator", "drafter", "launch", "models", "planner", "policies"}
)
_ABOVE = __name__.removesuffix("launch.errors")  # "paceline." in an installed wheel
_OURS = tuple(f"{_ABOVE}{package}." for package in OUR_PACKAGES)


class PacelineError(Exception):
    """An expected failure. `message` says what is wrong and where, `remedy` what to do about it."""

    exit_code = 1
    title = "Error"

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class UsageError(PacelineError):
    """The command line itself is wrong."""

    exit_code = 2
    title = "Usage error"


class RayLostError(PacelineError):
    """Ray's own servers are gone or silent. Nothing can be saved any more."""

    exit_code = 75  # temporary failure (sysexits.h): the same command with --resume continues


def as_expected(error: BaseException) -> PacelineError | None:
    """Return `error` as a PacelineError if it is an expected failure, else None (a bug: it deserves its traceback).

    Errors that a Ray task or actor raised are unwrapped to their cause.
    """
    cause = getattr(error, "cause", None)
    if type(error).__module__.startswith("ray.") and isinstance(cause, BaseException):
        return as_expected(cause)
    if isinstance(error, PacelineError):
        return error
    if type(error).__module__.startswith("ray.") and type(error).__name__ == "OutOfMemoryError":
        # The first line has the node's used memory; Ray adds a page of text.
        return PacelineError(f"Ray ended a process: {_first_line(error)}", remedy=_MEMORY_REMEDY)
    remedy = getattr(error, "remedy", None)
    if f"{type(error).__module__}.".startswith(_OURS):
        return PacelineError(str(error) or type(error).__name__, remedy=remedy if isinstance(remedy, str) else None)
    if isinstance(error, OSError):
        remedy = (
            "free disk space there, or choose another run.dir" if error.errno in FULL else _OS_REMEDIES.get(type(error))
        )
        return PacelineError(_os_message(error), remedy=remedy)
    return None


_MEMORY_REMEDY = (
    "end other programs on that machine, or use less memory: fewer rollout.workers, a smaller "
    "rollout.engine.kv_tokens, learner.lora; then repeat the command, with --resume if an RL step was done"
)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_OS_REMEDIES: dict[type[BaseException], str] = {
    FileNotFoundError: "check the path; relative paths are looked up from the current directory first",
    PermissionError: "check the permissions, or choose another run.dir",
}


def _os_message(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    if not error.filename:
        return error.strerror
    said = f"{error.strerror}: {error.filename}"
    return f"{said}. {room(Path(error.filename))}".rstrip() if error.errno in FULL else said


def show(error: PacelineError) -> None:
    """Print a red panel. If a line is too long, rules above and below replace it, so that commands can be copied."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    text = f"{error.message}\n\n{error.remedy}" if error.remedy else error.message
    body = Text(error.message)
    if error.remedy:
        body.append(f"\n\n{error.remedy}", style="dim")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    if max(len(line) for line in text.splitlines()) + 4 <= console.width:
        console.print(Panel(body, title=error.title, border_style="red", title_align="left"))
        return
    console.rule(f"[bold red]{error.title}", align="left", style="red")
    console.print(body, soft_wrap=True)
    console.rule(style="red")
