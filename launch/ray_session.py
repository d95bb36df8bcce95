"""Ray, started or attached to, for the time of a `with` block. Owns nothing else: actors belong to who made them.

    with ray_session(address=config.cluster.address, cpus=4) as session: ...

- `address` or RAY_ADDRESS (set inside a Ray job): attach to that cluster. A dead address is an error after a few
  seconds, not after the minutes for which Ray would retry.
- neither: a private head for this process, gone when the block ends. Ray's servers listen on every interface, so the
  head keeps Ray's token authentication, with a random token that lives in this process's environment only
  (RAY_AUTH_TOKEN or RAY_AUTH_MODE in the environment win).
- Ray already initialised in this process: used as it is, and left running.

A SIGTERM handler of this process stays in place (ray.init would replace it).
"""

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from launch.errors import PacelineError

_CONNECT_TIMEOUT_S = 5.0


class RaySessionError(PacelineError):
    """Ray cannot be started or reached."""


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
) -> Iterator[RaySession]:
    """`cpus`: logical CPUs of a private head, at least as many as the machine has (they only gate placement).
    `temp_dir`: session folder of a private head; keep it short, it holds Unix sockets (limit 107 characters).
    `log_to_driver`: print what actors print. Raises RaySessionError."""
    if ray.is_initialized():
        yield _session(owned=False)
        return
    before = signal.getsignal(signal.SIGTERM)
    address = address or os.environ.get("RAY_ADDRESS") or None
    # One line of news per session about the authentication mode, which is decided here, is not news.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    try:
        if address is not None and address != "local":
            check_reachable(address, connect_timeout_s)
            ray.init(address=address, **common)
        else:
            if os.environ.get("RAY_AUTH_MODE") is None:
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            if temp_dir is not None:
                common["_temp_dir"] = str(temp_dir)
            ray.init(
                address="local",
                num_cpus=max(cpus or 0, os.cpu_count() or 1),  # type: ignore[arg-type]
                num_gpus=gpus,
                include_dashboard=dashboard,
                object_store_memory=object_store_bytes,
                **common,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"Ray at {address!r} cannot be used" if address else "Ray cannot be started"
        raise RaySessionError(f"{where}: {error}", remedy="see the last lines of Ray's own logs named above") from error
    if before not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init put sys.exit in its place
    try:
        yield _session(owned=address in (None, "local"))
    finally:
        ray.shutdown()


def check_reachable(address: str, timeout_s: float) -> None:
    """Raise RaySessionError unless something accepts connections at `address` (host:port, or "auto")."""
    if address.startswith("ray://"):
        raise RaySessionError(
            f"cluster.address {address!r}: Ray Client is not supported",
            remedy="run on the cluster: ray job submit --working-dir . -- python -m launch train ...",
        )
    target = _running_cluster() if address == "auto" else address
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise RaySessionError(
            f"cluster.address {address!r} is not host:port", remedy="use the GCS address, for example 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise RaySessionError(
            f"no Ray cluster answers at {target} ({error})",
            remedy="start one (ray start --head), or unset cluster.address and RAY_ADDRESS to start a private head",
        ) from error


def _running_cluster() -> str:
    """What `ray start` on this machine wrote down."""
    root = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir() if os.name == "nt" else "/tmp"))
    try:
        return (root / "ray" / "ray_current_cluster").read_text().strip()
    except OSError as error:
        raise RaySessionError(
            'cluster.address "auto", but no Ray runs on this machine',
            remedy="start one (ray start --head), or give its host:port",
        ) from error


def _session(*, owned: bool) -> RaySession:
    context = ray.get_runtime_context()
    url = ray._private.worker.get_dashboard_url()  # type: ignore[no-untyped-call]
    return RaySession(address=context.gcs_address, owned=owned, dashboard_url=f"http://{url}" if url else None)
