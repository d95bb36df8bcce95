"""A typed client of the admin service. It holds one channel and translates gRPC's errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from coordinator.admin import admin_pb2 as pb
from coordinator.admin.credentials import NO_CREDENTIALS, Credentials
from coordinator.admin.messages import SERVICE, change_record, status_record
from coordinator.status import Change, Status


class NoCoordinatorError(ConnectionError):
    """No server answers at the address."""


class RequestRefusedError(ValueError):
    """The coordinator refused the request; the message has its reason."""


class NotAllowedError(PermissionError):
    """The service requires a token, or a different one."""


class AdminClient:
    """Client of the admin service at `address` (host:port). Every call but `watch` ends within `timeout_s`. Calls raise
    NoCoordinatorError, NotAllowedError and RequestRefusedError.
    """

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS, timeout_s: float = 5.0) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._metadata = credentials.metadata
        self._channel = credentials.channel(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def status(self) -> Status:
        return self._call("GetStatus", pb.Empty())

    def drain(self, *, worker: str = "", node: str = "", reason: str = "") -> Status:
        """Stop drafter training on one worker or node, and start none there. Give exactly one of the two."""
        return self._call("Drain", pb.DrainRequest(worker=worker, node=node, reason=reason))

    def undrain(self, *, worker: str = "", node: str = "") -> Status:
        return self._call("Undrain", pb.DrainRequest(worker=worker, node=node))

    def pause(self) -> Status:
        """Stop drafter training until `resume`."""
        return self._call("Pause", pb.Empty())

    def resume(self) -> Status:
        return self._call("Resume", pb.Empty())

    def set_threshold(self, idle_workers: int) -> Status:
        """Set the number of idle workers of one group that starts a session."""
        return self._call("SetThreshold", pb.SetThresholdRequest(idle_workers=idle_workers))

    def watch(self, every_s: float = 2.0) -> Iterator[Status | Change]:
        """Yield a status, then every change as it arrives, and a status every `every_s` seconds, without end."""
        method = self._channel.unary_stream(
            f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString
        )
        stream = method(pb.WatchRequest(every_s=every_s), metadata=self._metadata)
        try:
            while True:
                with self._answering():
                    update: pb.Update = next(stream)
                if update.HasField("status"):
                    yield status_record(update.status)
                else:
                    yield change_record(update.change)
        except StopIteration:
            raise self._gone("the coordinator has ended") from None
        finally:
            stream.cancel()

    def _call(self, method: str, request: Any) -> Status:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", type(request).SerializeToString, pb.Status.FromString)
        with self._answering():
            answer = call(request, timeout=self._timeout_s, metadata=self._metadata)
        return status_record(answer)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise self._gone(str(details)) from None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise NotAllowedError(f"the coordinator at {self.address} refuses: {details}") from None
            raise RequestRefusedError(str(details)) from None

    def _gone(self, details: str) -> NoCoordinatorError:
        return NoCoordinatorError(f"no coordinator answers at {self.address}: {details}")
