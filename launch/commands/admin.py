"""`paceline status`, `drain`, `pause`, `resume` and `threshold`. Owns these commands and their output. They query the
coordinator's admin service; without a coordinator, `status` reads the run's folder. No torch, no ray."""

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeGuard

import typer

from launch.commands.failures import failures
from launch.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.admin.client import AdminClient
    from coordinator.admin.credentials import Credentials
    from coordinator.status import Change, Status

Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="folder of the run; default: the newest below runs/", show_default=False),
]
At = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="address of the admin service, in place of RUN")
]
With = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="FOLDER",
        help="with --address: folder with copies of the run's admin-token and admin.crt",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON (with --watch: one document per line)")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of a failure")]

_FILES = "admin-token and admin.crt"
_COLOURS = {"BUSY": "green", "IDLE": "yellow", "TRAINING": "cyan"}


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""

    @app.command()
    def status(
        run: Run = None,
        address: At = None,
        credentials: With = None,
        watch: Annotated[bool, typer.Option("--watch", "-w", help="keep showing changes until interrupted")] = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        """Show a run's step, phase, last event and workers."""
        with failures(debug, into_pipe=True):
            if address is None:
                run = run if run is not None else _newest(Path("runs"))
                if run is not None and not run.is_dir():
                    raise PacelineError(f"no run in {run}: there is no such folder", remedy="give the folder of a run")
                if _is_run(run) and (not _has_coordinator(run) or not (as_json or watch)):
                    _show_run(run, as_json, watch=watch)
                if _is_run(run) and not _has_coordinator(run):
                    return
            with _client(run, address, credentials) as client:
                if watch:
                    _watch(client, as_json=as_json)
                else:
                    _show(client.status(), as_json)

    @app.command()
    def drain(
        run: Run = None,
        worker: Annotated[str, typer.Option("--worker", help="name of a worker")] = "",
        node: Annotated[str, typer.Option("--node", help="name of a node: all its workers")] = "",
        reason: Annotated[str, typer.Option("--reason", help="reason to show in status")] = "",
        undo: Annotated[bool, typer.Option("--undo", help="allow training again")] = False,
        address: At = None,
        credentials: With = None,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        """Stop drafter training on a worker or node, and keep it off. Rollouts there continue."""
        with failures(debug, into_pipe=True):
            if bool(worker) == bool(node):
                raise UsageError("give either --worker or --node")
            with _client(run, address, credentials) as client:
                if undo:
                    after = client.undrain(worker=worker, node=node)
                else:
                    after = client.drain(worker=worker, node=node, reason=reason)
            _show(after, as_json)

    @app.command()
    def pause(
        run: Run = None, address: At = None, credentials: With = None, as_json: Json = False, debug: Debug = False
    ) -> None:
        """Stop drafter training on all workers until `resume`. Rollouts continue."""
        with failures(debug, into_pipe=True), _client(run, address, credentials) as client:
            _show(client.pause(), as_json)

    @app.command()
    def resume(
        run: Run = None, address: At = None, credentials: With = None, as_json: Json = False, debug: Debug = False
    ) -> None:
        """Allow drafter training again after `pause`."""
        with failures(debug, into_pipe=True), _client(run, address, credentials) as client:
            _show(client.resume(), as_json)

    @app.command()
    def threshold(
        workers: Annotated[int, typer.Argument(min=1, help="idle workers of a group that start a training session")],
        run: Run = None,
        address: At = None,
        credentials: With = None,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        """Set the number of idle workers that starts drafter training."""
        with failures(debug, into_pipe=True), _client(run, address, credentials) as client:
            _show(client.set_threshold(workers), as_json)


def find_address(run: Path | None, runs: Path = Path("runs")) -> tuple[str, str, Path]:
    """Return the admin service's host:port, how it was found, and the run's folder. Raises PacelineError if there is
    none."""
    from coordinator.address import FILE_NAME, Address

    if run is None:
        files = sorted(runs.glob(f"*/{FILE_NAME}"), key=os.path.getmtime)
        if not files:
            raise PacelineError(
                f"no run below {runs.resolve()} has a coordinator",
                remedy="give the folder of a run, or --address HOST:PORT",
            )
        run = files[-1].parent
    found = Address.read(run)
    if found is None:
        raise PacelineError(
            f"{run / FILE_NAME} does not exist: this run has no coordinator yet, or needs none",
            remedy="a run has a coordinator if drafter.train=true",
        )
    return found.admin, f"{run / FILE_NAME}, written by process {found.pid} on {found.host}", run


@contextmanager
def _client(run: Path | None, address: str | None, credentials: Path | None) -> Iterator["AdminClient"]:
    if run is not None and address is not None:
        raise UsageError("give RUN or --address, not both")
    if address is None and credentials is not None:
        raise UsageError("--credentials needs --address: for RUN they are read from its folder")
    if credentials is not None and not credentials.is_dir():
        raise PacelineError(
            f"--credentials: {credentials} is not a folder", remedy=f"copy {_FILES} of the run to a folder"
        )
    where, source, folder = (address, "--address", credentials) if address is not None else find_address(run)
    from coordinator.admin.client import AdminClient, NoCoordinatorError, NotAllowedError
    from coordinator.admin.credentials import NO_CREDENTIALS, Credentials
    from coordinator.errors import SetupError

    try:
        known = NO_CREDENTIALS if folder is None else Credentials.read(folder)
    except SetupError as error:
        raise PacelineError(str(error), remedy="run the command as that user, or ask for a copy") from error
    with AdminClient(where, known) as client:
        try:
            yield client
        except NotAllowedError as error:
            asked = f"the one in {folder} does not match" if known.token else "none was given"
            raise PacelineError(
                f"the coordinator at {where} ({source}) requires its token: {asked}",
                remedy=f"give the run's folder, or copy {_FILES} from it and give --credentials FOLDER",
            ) from error
        except NoCoordinatorError as error:
            raise PacelineError(
                f"no coordinator answers at {where} ({source}){_over(known, where)}",
                remedy="the run has ended, its coordinator is being restarted (try again in some seconds), it runs on "
                f"another machine (ssh -L), or it speaks TLS (--credentials FOLDER, with the run's {_FILES})",
            ) from error


def _over(known: "Credentials", address: str) -> str:
    if not known.encrypts(address):
        return ""
    whose = "the run's certificate" if known.certificate else "a certificate of a public authority"
    return f" over TLS, with {whose}"


def _newest(runs: Path) -> Path | None:
    """Return the run with the newest file, without evaluations; None if there is none."""
    files = [file for name in ("events.jsonl", "coordinator.json") for file in runs.glob(f"*/{name}")]
    files = [file for file in files if ".eval-" not in file.parent.name]
    return max(files, key=os.path.getmtime).parent if files else None


def _is_run(run: Path | None) -> TypeGuard[Path]:
    return run is not None and (run / "events.jsonl").exists()


def _has_coordinator(run: Path) -> bool:
    """Whether the run has a coordinator, or had one, since the file stays."""
    from coordinator.address import FILE_NAME
    from launch.run_folder import holder

    return (run / FILE_NAME).exists() and bool(holder(run))


def _show_run(run: Path, as_json: bool, *, watch: bool = False) -> None:
    """Show a run's status from its folder."""
    from launch.commands.status import read_run_status, status_lines

    if watch:
        raise PacelineError(
            f"{run} has no coordinator to watch: it trains no drafter, or it has ended",
            remedy=f"call paceline status {run} again, or follow {run}/run.log",
        )
    status = read_run_status(run)
    if as_json:
        typer.echo(json.dumps(asdict(status), indent=2))
        return
    for line in status_lines(status):
        typer.echo(line)


def _show(status: "Status", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(status), indent=2))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(rendered(status))


def _watch(client: "AdminClient", *, as_json: bool) -> None:
    """Show a live table on a terminal; elsewhere a table, then one line per change."""
    from coordinator.status import Status

    if as_json:
        for update in client.watch():
            kind = "status" if isinstance(update, Status) else "change"
            typer.echo(json.dumps({kind: asdict(update)}))
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    changes: deque[str] = deque(maxlen=8)
    if not console.is_terminal:
        shown = False
        for update in client.watch():
            if not isinstance(update, Status):
                typer.echo(change_line(update))
            elif not shown:
                console.print(rendered(update))
                shown = True
        return
    with Live(console=console, auto_refresh=False) as live:
        for update in client.watch(every_s=0.5):
            if isinstance(update, Status):
                live.update(Group(rendered(update), Text("\n".join(changes), style="dim")), refresh=True)
            else:
                changes.append(change_line(update))


def rendered(status: "Status") -> "RenderableType":
    """Return one line about the coordinator and a table of its workers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    leaders = {session.members[0] for session in status.sessions if session.members}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("worker", "state", "for", "session", "work", "group", "node", "remarks"):
        table.add_column(column, no_wrap=column != "remarks")
    for worker in sorted(status.workers, key=attrgetter("name")):
        remarks = [text for text, holds in (("drained", worker.drained), ("leads", worker.name in leaders)) if holds]
        if worker.rests_s > 0:
            remarks.append(f"pauses {worker.rests_s:.0f} s")
        if worker.trainer_failures:
            remarks.append(f"{worker.trainer_failures} trainer failures")
        if worker.state == "TRAINING":
            work = f"micro-step {worker.step}"
        else:
            work = f"{worker.running} requests" if worker.running else ""
        state = f"{worker.state} ({worker.phase})" if worker.phase not in ("", "running") else worker.state
        table.add_row(
            worker.name,
            Text(state, style=_COLOURS.get(worker.state, "")),
            _duration(worker.in_state_s),
            str(worker.session or ""),
            work,
            worker.group,
            worker.node,
            ", ".join(remarks),
        )
    return Group(Text(_headline(status), style="bold"), table if status.workers else Text("no workers registered"))


def _headline(status: "Status") -> str:
    step = "no RL step yet" if status.rollout_step is None else f"RL step {status.rollout_step}"
    if status.settling:
        doing = "restarted, waiting for workers to register"
    elif status.paused:
        doing = "spot training is paused"
    else:
        doing = "idle workers may train" if status.rolling else "no training now"
    training = sum(worker.state == "TRAINING" for worker in status.workers)
    line = f"{step}, {doing}; {training} of {len(status.workers)} workers train; threshold {status.threshold}"
    if status.drained_nodes:
        line += f"; drained nodes: {', '.join(status.drained_nodes)}"
    return f"{line}; up {_duration(status.uptime_s)}"


def change_line(change: "Change") -> str:
    """Return one line for a change."""
    at = datetime.fromtimestamp(change.at_s).strftime("%H:%M:%S.%f")[:-3]
    if change.group:
        members = ", ".join(change.members) or "ended"
        return f"{at}  session {change.session} of {change.group}, epoch {change.epoch}: {members}"
    before, after = change.before or "new", change.after or "gone"
    return f"{at}  {change.worker}: {before} -> {after} ({change.reason})"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
