"""CURVE for the coordinator's socket: key files and the allow-list, which says who may connect under which name.

A directory of keys holds `coordinator-key.json`, `worker-key.json` and `driver-key.json` (a key pair each, readable by
their owner only) and `allowed.json`: public key to peer name, where "*" is any worker. Workers need `worker-key.json`
and the public half of `coordinator-key.json`; copy only what a machine needs. A run without any makes its own (`Keys`).
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from config.coordinator import CoordinatorOptions, CurveOptions
from coordinator.errors import SetupError
from coordinator.files import write_private
from coordinator.wire import DRIVER

ANY_WORKER = "*"
COORDINATOR, WORKER = "coordinator", "worker"  # the other role is DRIVER
_KEY_FILE = "{}-key.json"  # of a role; .gitignore and .dockerignore list this pattern


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The coordinator's key pair (Z85 text, from zmq.curve_keypair), and who may connect: public key to name."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: dict[bytes, str]
    allowed_file: Path | None = None  # read again if an unknown key connects: workers may have been added

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of `key` may connect. ZeroMQ's authenticator asks under this name."""
        if key not in self.allowed and self.allowed_file is not None:
            with suppress(SetupError):
                self.allowed.update(_allowed(self.allowed_file))
        return key in self.allowed

    def admits(self, key: str, peer: str) -> bool:
        """Return whether the owner of `key` may speak as `peer`."""
        name = self.allowed.get(key.encode("ascii", "replace"))
        return name == peer or (name == ANY_WORKER and peer != DRIVER)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A peer's key pair and the coordinator's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


def write_keys(directory: Path, roles: Sequence[str] = (COORDINATOR, WORKER, DRIVER)) -> None:
    """Make new key files. Raises FileExistsError rather than replace one."""
    directory.mkdir(parents=True, exist_ok=True)
    public_keys = {}
    for name in roles:
        public, secret = zmq.curve_keypair()
        public_keys[name] = public.decode()
        pair = json.dumps({"public": public.decode(), "secret": secret.decode()})
        path = directory / _KEY_FILE.format(name)
        if path.exists():
            raise FileExistsError(f"{path} exists: choose another folder, or remove it")
        write_private(path, pair + "\n")
    names = {WORKER: ANY_WORKER, DRIVER: DRIVER}
    allowed = {key: names[role] for role, key in public_keys.items() if role in names}
    (directory / "allowed.json").write_text(json.dumps(allowed, indent=2) + "\n", encoding="utf-8")


def server_keys(directory: Path) -> ServerKeys:
    """Read the coordinator's keys and allow-list. Raises SetupError."""
    pair, file = _read(directory / _KEY_FILE.format(COORDINATOR)), directory / "allowed.json"
    return ServerKeys(_key(directory, pair, "public"), _key(directory, pair, "secret"), _allowed(file), file)


def client_keys(directory: Path, role: str) -> ClientKeys:
    """Read a peer's keys. role: worker or driver. Raises SetupError."""
    pair, server = (_read(directory / _KEY_FILE.format(name)) for name in (role, COORDINATOR))
    public, secret = _key(directory, pair, "public"), _key(directory, pair, "secret")
    return ClientKeys(public, secret, _key(directory, server, "public"))


class Keys:
    """The key pairs of a run, made by its driver. `options` are the coordinator's options.

    Where key files are configured, these: all workers share one pair. Else new ones in `directory`, on loopback too,
    where every user of the machine reaches the port: every worker has a pair of its own and can speak as nobody else.
    None, if `curve.enabled` is false. Raises SetupError.
    """

    def __init__(self, options: CoordinatorOptions, directory: Path) -> None:
        configured = options.curve.directory
        made = None if options.curve.enabled is False else directory
        self._directory = made if configured is None else Path(configured)
        self._own: dict[str, ClientKeys] | None = None  # by worker
        if self._directory is not None and configured is None:
            for role in (COORDINATOR, DRIVER):  # of an earlier driver
                (self._directory / _KEY_FILE.format(role)).unlink(missing_ok=True)
            write_keys(self._directory, (COORDINATOR, DRIVER))
            self._directory.chmod(0o700)
            self._own = {}
            options = options.model_copy(update={"curve": CurveOptions(directory=str(self._directory.resolve()))})
        self.options = options

    @property
    def driver(self) -> ClientKeys | None:
        """Return the driver's keys; None means no encryption."""
        return None if self._directory is None else client_keys(self._directory, "driver")

    def worker(self, name: str) -> ClientKeys | None:
        """Return the keys of a worker, which may from now on connect as `name` only; None means no encryption."""
        if self._directory is None or self._own is None:
            return None if self._directory is None else client_keys(self._directory, "worker")
        if name not in self._own:
            public, secret = zmq.curve_keypair()
            allowed = _read(self._directory / "allowed.json")
            write_private(
                self._directory / "allowed.json", json.dumps(allowed | {public.decode(): name}, indent=2) + "\n"
            )
            self._own[name] = ClientKeys(public, secret, client_keys(self._directory, "driver").server)
        return self._own[name]


def authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> ThreadAuthenticator:
    """Return the guard of every CURVE socket of `context`; stop it before the context ends."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=keys)
    return guard


def _allowed(file: Path) -> dict[bytes, str]:
    return {key.encode(): name for key, name in _read(file).items()}


def _read(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"no usable key file {path} ({error}): make the files with python -m coordinator keys DIRECTORY"
        ) from None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise SetupError(f"{path} is no key file")
    return value


def _key(directory: Path, pair: dict[str, str], half: str) -> bytes:
    if len(pair.get(half, "")) != 40:
        raise SetupError(f"a key file in {directory} lacks its {half} key (40 characters of Z85)")
    return pair[half].encode()
