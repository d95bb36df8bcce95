"""Ray actor that hosts the coordinator and is restarted wherever it dies. It only starts and stops the service.

Workers and the driver connect to it over ZeroMQ, people over gRPC; Ray only starts it and provides its address. It
stays on the driver's node, so that the address file in the run's folder outlives it and its successor uses the same
ports.
"""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import ray

from actors.identity import log_to
from config.coordinator import CoordinatorOptions
from contracts.coordinator import Drain, Undrain
from coordinator.service import CoordinatorService

_log = logging.getLogger(__name__)


class CoordinatorActor:
    """An actor by `ray.remote(CoordinatorActor)`.

    If CoordinatorService raises at the first start, every call raises that error, because Ray passes only the text of
    an exception from a constructor."""

    def __init__(
        self,
        options: CoordinatorOptions,
        directory: str,
        workers: Sequence[str],
        *,
        run: str = "",
        log: str | None = None,
    ) -> None:
        """workers: those that may register, at first. run: its coordinators succeed one another. log: see log_to."""
        log_to(log, "coordinator")
        # A bug ends the process: Ray starts another, which requests the workers' state.
        end = partial(os._exit, 1)
        self._started: CoordinatorService | Exception
        try:
            self._started = CoordinatorService(
                options, directory=Path(directory), run=run, members=workers, on_failure=end
            )
        except Exception as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            self._started = error
        else:
            _log.info("serves at %s", self._started.endpoint)

    def __repr__(self) -> str:
        return "coordinator"

    @property
    def _service(self) -> CoordinatorService:
        if isinstance(self._started, Exception):
            raise self._started
        return self._started

    @ray.method
    def admit(self, worker: str) -> None:
        """Allow another worker to register. Repeat the call for a restarted actor."""
        self._service.admit(worker)

    @ray.method
    def drain(self, node: str, reason: str) -> None:
        """Train no drafter on this node (its address, or Ray's node id) any more. Applies to successors too."""
        self._service.control(Drain(node=node, reason=reason))

    @ray.method
    def undrain(self, node: str) -> None:
        """Allow training on the node again; also called once the node is gone."""
        self._service.control(Undrain(node=node))

    @ray.method
    def endpoint(self) -> str:
        """Return the address for WorkerClient and DriverClient: tcp://host:port."""
        return self._service.endpoint
