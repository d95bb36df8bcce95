"""Turn a failed command into a message on stderr and an exit code. Owns the exit code; `launch.errors` decides which
failures are expected. No torch, no ray."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from launch.errors import PacelineError, as_expected, show
from launch.interrupt import Interrupted


@contextmanager
def failures(debug: bool, *, into_pipe: bool = False) -> Iterator[None]:
    """Turn expected failures into a panel and an exit code; bugs keep their traceback.

    into_pipe: the command only prints, so a closed pipe means that the reader (`head`) has finished.
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
