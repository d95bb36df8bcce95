"""The gRPC admin service of one coordinator, with health and reflection. Owns its port and threads; makes no decisions.

Beyond loopback it requires a token and TLS: see `coordinator.admin.credentials`.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from contracts.coordinator import ControlEvent, Drain, Pause, Resume, SetThreshold, Undrain
from coordinator.admin import admin_pb2 as pb
from coordinator.admin.credentials import TokenCheck
from coordinator.admin.messages import SERVICE, change_message, status_message
from coordinator.feed import StatusFeed
from coordinator.machine import UnknownTargetError
from coordinator.status import Status

MAX_WATCHERS = 16
_THREADS = MAX_WATCHERS + 8
_POLL_S = 0.5  # between two checks whether a watcher is still connected


class Coordinator(Protocol):
    """The coordinator's operations that the service offers."""

    def status(self) -> Status: ...
    def control(self, event: ControlEvent) -> None: ...


class AdminServer:
    """Serves until `close`. Raises OSError if it cannot listen on `address` (host:port, port 0: any).

    token: required from callers; empty: none. certificate: private key and certificate, PEM; None: unencrypted."""

    def __init__(
        self,
        coordinator: Coordinator,
        feed: StatusFeed,
        address: str,
        *,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._coordinator, self._feed = coordinator, feed
        self._places = threading.Semaphore(MAX_WATCHERS)
        self._closing = False
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="admin"),
            options=[("grpc.so_reuseport", 0)],
            interceptors=[TokenCheck(token)] if token else [],
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            if certificate is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
        except RuntimeError as error:
            raise OSError(f"the admin service cannot listen on {address}: {error}") from None
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def close(self, grace_s: float = 0.5) -> None:
        self._closing = True
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        unary: dict[str, tuple[Any, Any]] = {
            "GetStatus": (self._status, pb.Empty),
            "Drain": (self._drain, pb.DrainRequest),
            "Undrain": (self._undrain, pb.DrainRequest),
            "Pause": (self._pause, pb.Empty),
            "Resume": (self._resume, pb.Empty),
            "SetThreshold": (self._set_threshold, pb.SetThresholdRequest),
        }
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch, pb.WatchRequest.FromString, pb.Update.SerializeToString
        )
        return {"Watch": watch} | {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, pb.Status.SerializeToString)
            for name, (method, request) in unary.items()
        }

    def _drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.Status:
        return self._control(Drain(request.worker, request.node, request.reason), context)

    def _undrain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.Status:
        return self._control(Undrain(request.worker, request.node), context)

    def _pause(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.Status:
        return self._control(Pause(), context)

    def _resume(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.Status:
        return self._control(Resume(), context)

    def _set_threshold(self, request: pb.SetThresholdRequest, context: grpc.ServicerContext) -> pb.Status:
        return self._control(SetThreshold(request.idle_workers), context)

    def _control(self, event: ControlEvent, context: grpc.ServicerContext) -> pb.Status:
        try:
            with _answering(context):
                self._coordinator.control(event)
        except UnknownTargetError as error:
            named = isinstance(event, Drain | Undrain) and bool(event.worker) != bool(event.node)
            context.abort(grpc.StatusCode.NOT_FOUND if named else grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self._status(None, context)

    def _status(self, request: object, context: grpc.ServicerContext) -> pb.Status:
        with _answering(context):
            return status_message(self._coordinator.status())

    def _watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Update]:
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {MAX_WATCHERS} watchers already")
        every_s = request.every_s or 2.0
        try:
            with self._feed.subscribe() as subscription:
                status_at_s = 0.0
                while context.is_active() and not (self._closing and subscription.changes.empty()):
                    if subscription.cut_off:
                        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "reads too slowly")
                    now_s = time.monotonic()
                    if now_s >= status_at_s:
                        status_at_s = now_s + every_s
                        yield pb.Update(status=self._status(None, context))
                    try:
                        wait_s = min(_POLL_S, max(0.0, status_at_s - now_s))
                        yield pb.Update(change=change_message(subscription.changes.get(timeout=wait_s)))
                    except Empty:
                        continue
        finally:
            self._places.release()


@contextmanager
def _answering(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, ConnectionError) as error:
        context.abort(grpc.StatusCode.UNAVAILABLE, f"the coordinator does not answer: {error}")
