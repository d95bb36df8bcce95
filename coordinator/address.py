"""Address of a coordinator: the file `coordinator.json` in the folder of its run."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from config.coordinator import OPEN_TO_ALL
from coordinator.errors import SetupError

FILE_NAME = "coordinator.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a running or former coordinator."""

    endpoint: str  # for workers and the driver: tcp://host:port
    admin: str  # host:port
    term: int
    pid: int
    host: str
    started_s: float  # Unix time
    admin_tls: bool = False

    def write(self, directory: Path) -> None:
        """Write the file atomically. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        beside = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the file; None if there is none. Raises SetupError."""
        path = directory / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise SetupError(f"{path} is no coordinator's address file: {error}") from None


def reachable(address: str) -> str:
    """Return `address` (host:port) of a listener as others can reach it. A wildcard host is replaced by this machine's
    address.
    """
    host, _, port = address.rpartition(":")
    return f"{_own_address()}:{port}" if host.strip("[]") in OPEN_TO_ALL else address


def _own_address() -> str:
    """Return the address of the interface with the default route; loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        try:
            out.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737): nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(out.getsockname()[0])
