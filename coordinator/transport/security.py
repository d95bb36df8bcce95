"""CURVE for the coordinator's socket: keys and the allow-list. Owns nothing but them."""

from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.z85 import decode as z85_decode


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Key pair of the coordinator (Z85 text, as zmq.curve_keypair makes it) and the public keys that may connect."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes]

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Key pair of a worker and the coordinator's public key."""

    public: bytes
    secret: bytes
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


class _AllowList:
    def __init__(self, keys: ServerKeys) -> None:
        self._allowed = {z85_decode(key) for key in keys.allowed}

    def callback(self, domain: str, key: bytes) -> bool:
        return z85_decode(key) in self._allowed


def secure_server(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> ThreadAuthenticator:
    """An authenticator for every CURVE socket of `context`; stop it before the context ends."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=_AllowList(keys))
    return guard
