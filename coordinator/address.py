"""Where a coordinator is to be found: the file `coordinator.json` in the folder of its run. Owns its form only."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

FILE_NAME = "coordinator.json"


class AddressFileError(ValueError):
    """A file that is no coordinator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A coordinator that runs, or ran."""

    endpoint: str  # for workers and the driver: tcp://host:port
    admin: str  # host:port
    term: int
    pid: int
    host: str
    started_s: float  # Unix time

    def write(self, directory: Path) -> None:
        """Atomically, so that a reader never sees half of it."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        beside = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """None if there is no such file. Raises AddressFileError."""
        path = directory / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise AddressFileError(f"{path} is no coordinator's address file: {error}") from None
