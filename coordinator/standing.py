"""Standing orders: drains, a pause and a threshold, valid until revoked. A coordinator saves them in a file for its
successor, beside the address file.
"""

import os
from pathlib import Path
from typing import Annotated, Self

import msgspec

from coordinator.errors import SetupError

FILE_NAME = "coordinator-standing.json"
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standing orders. `threshold` is None if the configuration's applies. Names are sorted and unique."""

    paused: bool = False
    threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    workers: tuple[Name, ...] = ()  # drained, on any node
    nodes: tuple[Name, ...] = ()  # drained, by address or by Ray's node id

    def write(self, directory: Path, run: str) -> None:
        """Write the file atomically. Raises OSError."""
        path = directory / FILE_NAME
        beside = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(_File(run, self)), indent=2) + b"\n")
        beside.replace(path)

    @classmethod
    def read(cls, directory: Path, run: str) -> Self | None:
        """Read the file; None if there is none, or it is another run's. Raises SetupError, OSError."""
        path = directory / FILE_NAME
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SetupError(f"{path} cannot be read: {error}") from None
        kept = found.standing
        return cls(kept.paused, kept.threshold, kept.workers, kept.nodes) if found.run == run else None


NOTHING = Standing()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str  # its coordinators succeed one another; empty: any
    standing: Standing
