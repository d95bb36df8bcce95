"""CURVE for the coordinator's socket: key files and the allow-list. Owns who may connect, and under which name.

A directory of keys holds `coordinator.json`, `worker.json` and `driver.json` (a key pair each, readable by their owner
only) and `allowed.json`: public key to peer name, where "*" is any worker. Workers need the public half of
`coordinator.json` and `worker.json`; copy only what a machine needs.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from coordinator.options import CoordinatorOptions
from coordinator.wire import DRIVER

ANY_WORKER = "*"


class KeyFilesError(ValueError):
    """A directory without the key files that are needed, or with a file that is none."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The coordinator's key pair (Z85 text, as zmq.curve_keypair makes it), and who may connect: public key to name."""

    public: bytes
    secret: bytes
    allowed: dict[bytes, str]

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True

    def admits(self, key: str, peer: str) -> bool:
        """Whether the owner of `key` may speak as `peer`."""
        name = self.allowed.get(key.encode("ascii", "replace"))
        return name == peer or (name == ANY_WORKER and peer != DRIVER)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A peer's key pair and the coordinator's public key."""

    public: bytes
    secret: bytes
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


def write_keys(directory: Path) -> None:
    """Make new key files. Raises FileExistsError rather than replace one."""
    directory.mkdir(parents=True, exist_ok=True)
    public_keys = {}
    for name in ("coordinator", "worker", "driver"):
        public, secret = zmq.curve_keypair()
        public_keys[name] = public.decode()
        pair = json.dumps({"public": public.decode(), "secret": secret.decode()})
        descriptor = os.open(directory / f"{name}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(pair + "\n")
    allowed = {public_keys["worker"]: ANY_WORKER, public_keys["driver"]: DRIVER}
    (directory / "allowed.json").write_text(json.dumps(allowed, indent=2) + "\n", encoding="utf-8")


def server_keys(directory: Path) -> ServerKeys:
    """Raises KeyFilesError."""
    pair = _read(directory / "coordinator.json")
    allowed = {key.encode(): name for key, name in _read(directory / "allowed.json").items()}
    return ServerKeys(_key(directory, pair, "public"), _key(directory, pair, "secret"), allowed)


def client_keys(directory: Path, role: str) -> ClientKeys:
    """role: worker or driver. Raises KeyFilesError."""
    pair, server = _read(directory / f"{role}.json"), _read(directory / "coordinator.json")
    public, secret = _key(directory, pair, "public"), _key(directory, pair, "secret")
    return ClientKeys(public, secret, _key(directory, server, "public"))


def configured_keys(options: CoordinatorOptions, role: str) -> ClientKeys | None:
    """`client_keys` as the options say; None: no encryption. Raises KeyFilesError."""
    return None if options.curve.directory is None else client_keys(Path(options.curve.directory), role)


def authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> ThreadAuthenticator:
    """Guards every CURVE socket of `context`; stop it before the context ends."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=_AllowList(keys))
    return guard


class _AllowList:
    def __init__(self, keys: ServerKeys) -> None:
        self._allowed = keys.allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed


def _read(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KeyFilesError(
            f"no usable key file {path} ({error}): make the files with python -m coordinator keys DIRECTORY"
        ) from None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise KeyFilesError(f"{path} is no key file")
    return value


def _key(directory: Path, pair: dict[str, str], half: str) -> bytes:
    if len(pair.get(half, "")) != 40:
        raise KeyFilesError(f"a key file in {directory} lacks its {half} key (40 characters of Z85)")
    return pair[half].encode()
