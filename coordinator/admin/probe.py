"""Standard health check of a gRPC server. Ray's servers answer it too."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def answers(address: str, timeout_s: float) -> bool:
    """Return whether the server at `address` (host:port, unencrypted) reports in time that it serves. Never raises."""
    try:
        # A new channel: an old one would wait before it reconnects.
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False
