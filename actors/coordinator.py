"""The coordinator's home in a cluster: a Ray actor, restarted wherever it dies. Owns nothing but its start.

Workers and the driver speak to it over ZeroMQ, people over gRPC; Ray only starts it, and tells where it is. It stays on
the driver's node, so that the address file in the run's folder outlives it: its successor takes over the same ports.
"""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import ray

from actors.identity import log_to
from coordinator.options import CoordinatorOptions
from coordinator.service import CoordinatorService

_log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


class CoordinatorActor:
    """An actor by `ray.remote(CoordinatorActor)`. Raises in its constructor what CoordinatorService raises."""

    def __init__(
        self,
        options: CoordinatorOptions,
        directory: str,
        workers: Sequence[str],
        *,
        reachable: bool,
        log: str | None = None,
    ) -> None:
        """workers: who may register, at first. reachable: from other nodes, so not at the loopback address, whatever
        `options.host` says by default. log: see log_to."""
        log_to(log, "coordinator")
        if reachable and options.host == LOOPBACK:
            options = options.model_copy(
                update={"host": ray.util.get_node_ip_address()}  # type: ignore[no-untyped-call]
            )
        # A bug ends the process: Ray starts another, which asks the workers for the truth.
        end = partial(os._exit, 1)
        self._service = CoordinatorService(options, directory=Path(directory), members=workers, on_failure=end)
        _log.info("serves at %s", self._service.endpoint)

    def __repr__(self) -> str:
        return "coordinator"

    @ray.method
    def admit(self, worker: str) -> None:
        """It may register too; to be said again to an actor that was restarted."""
        self._service.admit(worker)

    @ray.method
    def endpoint(self) -> str:
        """For WorkerClient and DriverClient: tcp://host:port."""
        return self._service.endpoint
