"""How a failed command ends: a panel on stderr and an exit code. Owns both; `launch.errors` decides which failures are
expected. No torch, no ray.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from launch.errors import PacelineError, as_expected
from launch.interrupt import Interrupted


@contextmanager
def failures(debug: bool, *, into_pipe: bool = False) -> Iterator[None]:
    """Expected failures become a panel and an exit code; bugs keep their traceback.

    into_pipe: the command only prints, so a closed pipe means that the reader (`head`) has had enough.
    """
    try:
        yield
    except BrokenPipeError:
        if into_pipe:
            raise  # typer ends quietly
        _fail(PacelineError("a pipe to another process broke", remedy="run again with --debug"), debug)
    except (typer.Exit, typer.Abort):
        raise
    except (KeyboardInterrupt, Interrupted):
        typer.secho("interrupted", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        _fail(error, debug)


def _fail(error: Exception, debug: bool) -> NoReturn:
    expected = as_expected(error)
    if expected is None:
        if not debug:
            traceback.print_exception(error)
        expected = PacelineError(
            f"{type(error).__name__}: {error}".rstrip(": "),
            remedy="this is a bug: please report it with the traceback above",
        )
        expected.title = "Internal error"
    show(expected)
    raise typer.Exit(expected.exit_code) from None


def show(error: PacelineError) -> None:
    """A red panel; rules above and below instead where a line is too long, so that commands can still be copied."""
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
