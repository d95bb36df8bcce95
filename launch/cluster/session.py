"""A Ray session for the time of a `with` block: started, or attached to. Actors belong to their makers.

    with ray_session(address=address, cpus=4) as session: ...

- `address` or RAY_ADDRESS (set inside a Ray job): attach to that cluster. If no Ray answers there, that is an error
  after seconds, not after the minutes for which Ray retries.
- neither: a private head for this process, gone when the block ends. Ray's servers listen on every interface, so the
  head keeps Ray's token authentication, with a random token that lives in this process's environment only
  (RAY_AUTH_TOKEN or RAY_AUTH_MODE in the environment win).
- Ray already initialised in this process: used as it is, and left running.

A private head's servers are in sessions of their own: a signal to this process's group does not reach them. A head that
does not start in time is tried once more. Processes left by a head whose driver was killed are ended first. With
`on_lost` Ray's own servers are watched. This process ends when they are lost: a call to Ray that never returns leaves
no other way out.

A SIGTERM handler of this process stays in place (ray.init would replace it).
"""

import logging
import os
import re
import resource
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private.utils import resolve_object_store_memory

from coordinator.admin.probe import answers
from launch.cluster.processes import (
    end_processes,
    end_processes_afterwards,
    mark,
    servers_of,
    sessions_of_their_own,
    sweep,
)
from launch.cluster.watch import RayWatch
from launch.errors import PacelineError, RayLostError

_CONNECT_TIMEOUT_S = 15.0  # a busy head takes seconds to answer
_ASK_AGAIN_S = 0.2
_TELL_S = 5.0  # for `on_lost`, which may wait for a lock that the blocked thread holds
_OWN_ADDRESSES_BYTES = 4 * 2**30  # libraries, thread stacks and heaps of the driver, besides the object store
_START_REMEDY = (
    "the machine is too busy, or lacks memory or space in /tmp or /dev/shm: see the newest logs below {logs}; "
    "or start a head yourself (ray start --head) and set cluster.address"
)
_SETTINGS = {  # of a Ray of our own
    # Past tasks that the GCS keeps for `ray list tasks`: until Ray's own 100,000 it grew by 54 kB in a small RL step.
    "RAY_task_events_max_num_task_in_gcs": "2000",
    # By Ray's own 15 engines and the spot trainer, which lower their priority by 5 and 15, have the same: there is no
    # lower one than 19.
    "RAY_worker_niceness": "0",
}
_TOO_LONG = re.compile(r"AF_UNIX path length cannot exceed (\d+) bytes: (.+)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RaySession:
    address: str  # host:port of the GCS
    owned: bool  # started by us, stopped by us
    dashboard_url: str | None


@contextmanager
def ray_session(
    *,
    address: str | None = None,
    cpus: float | None = None,
    gpus: int | None = None,
    temp_dir: Path | None = None,
    dashboard: bool = False,
    object_store_bytes: int | None = None,
    log_to_driver: bool = False,
    connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    on_lost: Callable[[RayLostError], None] | None = None,
    lost_after_s: float = 45.0,
    code_paths: Sequence[str] = (),
) -> Iterator[RaySession]:
    """`cpus`: logical CPUs of a private head, at least as many as the machine has (they only gate placement).
    `temp_dir`: session folder of a private head; keep it short, it holds Unix sockets (limit 107 characters).
    `log_to_driver`: print what actors print. `on_lost` is told that Ray's servers are gone, or silent for
    `lost_after_s`, and has 5 s to tell others; then this process ends with RayLostError's exit code.
    `code_paths`: folders that go before all others on the `sys.path` of workers.
    Raises PacelineError."""
    if ray.is_initialized():
        yield _session(owned=False)
        return
    before = signal.getsignal(signal.SIGTERM)
    address = address or os.environ.get("RAY_ADDRESS") or None
    # The authentication mode is decided here, so Ray's message about it in each session is no news.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    if code_paths:
        common["job_config"] = ray.job_config.JobConfig(_py_driver_sys_path=list(code_paths))
    owned = address in (None, "local")
    if owned:
        if os.environ.get("RAY_AUTH_MODE") is None:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        if temp_dir is not None:
            common["_temp_dir"] = str(temp_dir)
        root = temp_dir or _temp_root()
        if ended := sweep(root):
            _log.warning("ended %d processes that an earlier Ray head had left behind", ended)
        common |= {"num_cpus": max(cpus or 0, os.cpu_count() or 1), "num_gpus": gpus, "include_dashboard": dashboard}
        _require_addresses(object_store_bytes)
        _start_head({**common, "object_store_memory": object_store_bytes}, root)
    else:
        assert address is not None
        check_reachable(address, connect_timeout_s)
        try:
            ray.init(address=address, **common)
        except Exception as error:  # Ray raises what it likes, plain Exception too
            raise PacelineError(
                f"Ray at {address!r} cannot be used: {_first_line(error)}",
                remedy="look at the cluster with: ray status --address " + address,
            ) from error
    if not log_to_driver:
        _keep_ray_off_the_terminal()
    if before not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init put sys.exit in its place
    session = _session(owned=owned)
    folder = Path(_session_dir()) if owned else None
    if folder is not None:
        with suppress(OSError):  # a full disk: then the folder stays unmarked
            mark(folder)
    try:
        if on_lost is None:
            yield session
            return
        servers, processes = _to_watch(session)
        with RayWatch(servers, processes, lost_after_s, lambda reason: _end(reason, on_lost, folder)) as watch:
            try:
                yield session
            except Exception:
                watch.settle()
                raise
            finally:
                watch.closing()
                ray.shutdown()
    finally:
        ray.shutdown()


def _require_addresses(store_bytes: int | None) -> None:
    """Every process maps the object store whole: with less room than that, servers die, or this process waits for ever.
    Raises PacelineError."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    store = resolve_object_store_memory(get_system_memory(), store_bytes)
    if limit < store + _OWN_ADDRESSES_BYTES:
        raise PacelineError(
            f"a process may have {limit / 2**30:.1f} GiB of addresses here (ulimit -v), and Ray's object store alone "
            f"takes {store / 2**30:.1f} GiB of them in each",
            remedy="ulimit -v unlimited; a cgroup limits memory itself (docker run -m, systemd-run -p MemoryMax=...)",
        )


def _start_head(arguments: dict[str, Any], root: Path) -> None:
    """Raises PacelineError."""
    for last in (False, True):
        try:
            with sessions_of_their_own():
                ray.init(address="local", **arguments)
            return
        except ValueError as error:
            raise PacelineError(f"Ray cannot be started: {_first_line(error)}") from error
        except Exception as error:  # Ray raises what it likes: a head that is not up in time is a plain Exception
            ray.shutdown()
            for folder in root.glob(f"session_*_{os.getpid()}"):
                end_processes(folder)
            said = _first_line(error)
            if remedy := _hopeless(error, root):
                raise PacelineError(f"Ray did not start: {said}", remedy=remedy) from error
            if last:
                raise PacelineError(
                    f"Ray did not start, twice: {said}", remedy=_START_REMEDY.format(logs=root)
                ) from error
            _log.warning("Ray did not start (%s): once more", said)


def _hopeless(error: Exception, root: Path) -> str:
    """Return the remedy for an error that a second try cannot fix; empty for others."""
    if (long := _TOO_LONG.search(str(error))) is not None:
        over = len(os.fsencode(long[2])) - int(long[1])
        return f"{root} is too long by {over} bytes for the sockets below it: set RAY_TMPDIR to a shorter path (/tmp)"
    return ""


def _to_watch(session: RaySession) -> tuple[dict[str, str], dict[str, int]]:
    """Return Ray's servers (host:port by name), and those processes on this machine whose end means that
    Ray is lost."""
    here = ray.get_runtime_context().get_node_id()
    servers = {"Ray's GCS": session.address}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["NodeID"] == here:
            servers["Ray's raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    # A cluster's GCS may come back; a node's raylet never does.
    names = {"raylet": "Ray's raylet"} | ({"gcs_server": "Ray's GCS"} if session.owned else {})
    return servers, {names[key]: pid for key, pid in servers_of(here).items() if key in names}


def _end(reason: str, on_lost: Callable[[RayLostError], None], folder: Path | None) -> None:
    """Report the loss, end what is left of our own head, and end this process."""
    error = RayLostError(reason)
    teller = threading.Thread(target=on_lost, args=(error,), daemon=True)
    teller.start()
    teller.join(_TELL_S)
    if folder is not None:
        end_processes_afterwards(folder)
    os._exit(error.exit_code)


def _keep_ray_off_the_terminal() -> None:
    """Send what Ray's servers print about lost processes to the driver's log: it is a paragraph with ids. The code that
    lost something reports it in our words."""

    said = logging.getLogger("raylet")
    said.addHandler(logging.NullHandler())  # otherwise Python prints unhandled records

    def into_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            said.warning("%s", line)

    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = into_log


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_reachable(address: str, timeout_s: float) -> None:
    """Raise PacelineError unless Ray's GCS answers at `address` (host:port, or "auto"). Ray itself would ask another
    server for minutes."""
    if address.startswith("ray://"):
        raise PacelineError(
            f"cluster.address {address!r}: Ray Client is not supported",
            remedy="run on the cluster: ray job submit --working-dir . -- python -m launch train ...",
        )
    target = _running_cluster() if address == "auto" else address
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise PacelineError(
            f"cluster.address {address!r} is not host:port", remedy="use the GCS address, for example 10.0.0.1:6379"
        )
    remedy = "start one (ray start --head), or unset cluster.address and RAY_ADDRESS to start a private head"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise PacelineError(f"no Ray cluster answers at {target} ({error})", remedy=remedy) from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # the question below is not encrypted
    deadline_s = time.monotonic() + timeout_s
    while not answers(target, max(0.1, deadline_s - time.monotonic())):
        if time.monotonic() >= deadline_s:
            raise PacelineError(
                f"something listens at {target}, but for {timeout_s:g} s it has not answered as Ray's GCS does",
                remedy="cluster.address and RAY_ADDRESS name the port of the GCS (6379 unless ray start --port says "
                f"otherwise; not 8265 or 10001): see ray status on the head; or {remedy}",
            )
        time.sleep(_ASK_AGAIN_S)


def _running_cluster() -> str:
    """Return the address that `ray start` on this machine wrote down."""
    try:
        return (_temp_root() / "ray_current_cluster").read_text().strip()
    except OSError as error:
        raise PacelineError(
            'cluster.address "auto", but no Ray runs on this machine',
            remedy="start one (ray start --head), or give its host:port",
        ) from error


def _session_dir() -> str:
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path())


def _temp_root() -> Path:
    """Return the folder of Ray's sessions, unless the environment sets another."""
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir() if os.name == "nt" else "/tmp")) / "ray"


def _session(*, owned: bool) -> RaySession:
    context = ray.get_runtime_context()
    url = ray._private.worker.get_dashboard_url()  # type: ignore[no-untyped-call]
    return RaySession(address=context.gcs_address, owned=owned, dashboard_url=f"http://{url}" if url else None)
