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
from config.coordinator import CoordinatorOptions
from contracts.coordinator import Drain, Undrain
from coordinator.service import CoordinatorService

_log = logging.getLogger(__name__)


class CoordinatorActor:
    """An actor by `ray.remote(CoordinatorActor)`. What CoordinatorService raises at its first start, every call raises:
    of what a constructor raises, Ray passes on a text only."""

    def __init__(
        self,
        options: CoordinatorOptions,
        directory: str,
        workers: Sequence[str],
        *,
        run: str = "",
        log: str | None = None,
    ) -> None:
        """workers: who may register, at first. run: whose coordinators follow one another. log: see log_to."""
        log_to(log, "coordinator")
        # A bug ends the process: Ray starts another, which asks the workers for the truth.
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
        """It may register too; to be said again to an actor that was restarted."""
        self._service.admit(worker)

    @ray.method
    def drain(self, node: str, reason: str) -> None:
        """No drafter is trained on this node (its address, or Ray's id) any more, nor by a successor of this one."""
        self._service.control(Drain(node=node, reason=reason))

    @ray.method
    def undrain(self, node: str) -> None:
        """The node may train again, or has gone."""
        self._service.control(Undrain(node=node))

    @ray.method
    def endpoint(self) -> str:
        """For WorkerClient and DriverClient: tcp://host:port."""
        return self._service.endpoint
