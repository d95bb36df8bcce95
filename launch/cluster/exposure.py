"""The servers of Ray that the network can reach. Whoever reaches one without a token can run code.

Owns the sentence that says so. Opens and closes nothing. It is never an error: only the user knows whose network it is.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

import grpc

from launch.cluster.session import RaySession

REMEDY = (
    "start every node with RAY_AUTH_MODE=token (docs/tutorials/cluster.md, 'The token') and the head with "
    "--dashboard-host=127.0.0.1; or keep others off this network"
)
_ASKED = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # the one call that needs no cluster id


def exposure(session: RaySession, *, token: bool) -> str:
    """Return what is reachable and what closes it; empty if nothing is. token: Ray asks its clients for a token.

    A private head (`owned`) is judged by its dashboard only: its other servers get a token of this process."""
    if token:
        return ""
    doors = [] if session.owned else [("its GCS", session.address)]
    if session.dashboard_url:
        doors.append(("its dashboard", urlsplit(session.dashboard_url).netloc))
    found = [f"{name} at {address}" for name, address in doors if not _is_loopback(address)]
    return f"Ray asks for no token, and the network reaches {' and '.join(found)}: {REMEDY}" if found else ""


def asks_for_token(session: RaySession, timeout_s: float = 5.0) -> bool:
    """Whether Ray refuses clients without a token. A private head follows this process (RAY_AUTH_MODE). Another head is
    called once without a token, since the mode of its clients says nothing about it. If that call gets no answer (Ray
    with TLS), the mode decides."""
    if not session.owned:
        with grpc.insecure_channel(session.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                channel.unary_unary(_ASKED)(b"", timeout=timeout_s)
                return False
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return True
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
