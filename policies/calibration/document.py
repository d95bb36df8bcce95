"""A calibration as a file: measurements on a device with a model, and the roofline fitted to them.

Owns the schema, its version, and the treatment of damaged files and those of other machines. Measures nothing.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from policies.calibration.roofline import MeasuredPass, Roofline, fit_roofline

FEW = 5  # measurements that make a typical time certain
MOST = 1000  # measurements counted of one shape, at most
VERSION: Literal[1] = 1
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CalibrationRefusedError(ValueError):
    """The calibration is of another model, precision or device, or of another version."""


class CalibrationKey(BaseModel, frozen=True, extra="forbid"):
    """The conditions on which times depend. Calibrations that differ in any field are not comparable."""

    model: str  # its shape
    precision: str  # dtype and quantization
    device: str  # processor, instruction set and threads, or the GPU's name

    def differences(self, other: "CalibrationKey") -> list[str]:
        """Return a line per field that differs, with both values."""
        return [
            f"{name} is {getattr(self, name)!r}, not {getattr(other, name)!r}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class PassCost(BaseModel, frozen=True, extra="forbid"):
    """A pass of the target without drafting: typical seconds of `count` steps."""

    requests: int = Field(ge=1)
    rows: int = Field(ge=1)
    context_tokens: int = Field(ge=0)
    seconds: _Seconds
    count: int = Field(default=1, ge=1)

    @property
    def measured(self) -> MeasuredPass:
        return MeasuredPass(self.requests, self.rows, self.context_tokens, self.seconds, min(self.count, FEW) / FEW)


class DraftCost(BaseModel, frozen=True, extra="forbid"):
    """Drafting for one step, all requests together."""

    strategy: str = Field(pattern=r"^\w+:[1-9]\d*(x\d+/\d+)?$")  # its text form: suffix:8, eagle:4x2/12
    requests: int = Field(ge=1)
    seconds: _Seconds
    count: int = Field(default=1, ge=1)

    @property
    def drafter(self) -> str:
        return self.strategy.partition(":")[0]

    @property
    def depth(self) -> int:
        return int(self.strategy.partition(":")[2].partition("x")[0])


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """All that is kept between runs."""

    version: Literal[1] = VERSION
    key: CalibrationKey
    passes: tuple[PassCost, ...] = ()
    drafts: tuple[DraftCost, ...] = ()
    fitted: Roofline | None = None  # None: still to be fitted to the passes

    @classmethod
    def measured(
        cls, key: CalibrationKey, passes: Iterable[PassCost], drafts: Iterable[DraftCost] = ()
    ) -> "Calibration":
        """Make a calibration with the roofline fitted to the passes, if there are any."""
        passes = tuple(passes)
        fitted = fit_roofline([one.measured for one in passes]) if passes else None
        return cls(key=key, passes=passes, drafts=tuple(drafts), fitted=fitted)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load(cls, path: Path, key: CalibrationKey) -> "Calibration | None":
        """Load the calibration at `path`. None if there is none, or if it was damaged; a damaged one is renamed to
        NAME.corrupt.

        Raises CalibrationRefusedError for one of another key or version, and OSError for an unreadable one.
        """
        try:
            text = path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            _set_aside(path)
            return None
        try:
            version = json.loads(text)["version"]
        except (ValueError, KeyError, TypeError):
            _set_aside(path)
            return None
        if version != VERSION:
            raise CalibrationRefusedError(
                f"{path}: version is {version!r}, this program reads {VERSION}; remove the file or calibrate anew"
            )
        try:
            found = cls.model_validate_json(text)
        except ValidationError:
            _set_aside(path)
            return None
        if differences := found.key.differences(key):
            raise CalibrationRefusedError(f"{path}: a calibration of another engine: {'; '.join(differences)}")
        return found


def _set_aside(path: Path) -> None:
    path.replace(path.with_name(f"{path.name}.corrupt"))
