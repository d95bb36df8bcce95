"""What has been asked of a coordinator and holds until it is taken back: drains, a pause, a threshold. Owns the file in
which a coordinator keeps that for its successor, beside the address file; decides nothing.
"""

import os
from pathlib import Path
from typing import Annotated, Self

import msgspec

FILE_NAME = "coordinator-standing.json"
Name = Annotated[str, msgspec.Meta(min_length=1)]


class StandingFileError(ValueError):
    """A file that is none of a coordinator's, or half of one."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`threshold` is None where the configuration's holds. Names are in order, each once."""

    paused: bool = False
    threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    workers: tuple[Name, ...] = ()  # drained, whatever their node
    nodes: tuple[Name, ...] = ()  # drained, by address or by Ray's id

    def write(self, directory: Path, run: str) -> None:
        """Atomically: a reader finds this or what was there before. Raises OSError."""
        path = directory / FILE_NAME
        beside = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(_File(run, self)), indent=2) + b"\n")
        beside.replace(path)

    @classmethod
    def read(cls, directory: Path, run: str) -> Self | None:
        """None: there is no such file, or it is of another run. Raises StandingFileError, OSError."""
        path = directory / FILE_NAME
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StandingFileError(f"{path} cannot be read: {error}") from None
        kept = found.standing
        return cls(kept.paused, kept.threshold, kept.workers, kept.nodes) if found.run == run else None


NOTHING = Standing()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str  # whose coordinators follow one another; empty: any
    standing: Standing
