"""What passes between a process engine and its child beside commands and events: how the child starts and ends, and
recorded states as memory. Plain data."""

from dataclasses import dataclass, replace

import numpy as np

from actors.processes.link import Bytes
from config.formats import Quantization
from config.model import LoraOptions, ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from contracts.rollout import Recorded
from policies.calibration.document import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message to a child."""

    model: ModelOptions
    options: EngineOptions
    seed: int
    weights_version: int
    niceness: int
    speculation: SpeculationOptions
    recording_bytes: int = 0
    recorded_layers: tuple[int, ...] | None = None
    quantization: Quantization = "none"
    lora: LoraOptions | None = None  # weights come as its adapters
    calibrations: tuple[Calibration, ...] = ()  # of this model and precision, of any device
    calibration_path: str = ""  # the file of the only one, where no other will do
    code_paths: tuple[str, ...] = ()  # where else a user's drafters are looked for


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    """First message from a child that came up."""


@dataclass(frozen=True, slots=True)
class RecordedHeader:
    """A Recorded event whose states come as memory, one record behind the other; here they have no rows."""

    event: Recorded
    rows: tuple[int, ...]  # of each record

    @classmethod
    def split(cls, event: Recorded) -> tuple["RecordedHeader", Bytes]:
        empty = tuple(replace(record, states=record.states[:0]) for record in event.records)
        rows = tuple(record.rows for record in event.records)
        return cls(replace(event, records=empty), rows), np.concatenate([r.states.ravel() for r in event.records])

    def join(self, memory: Bytes) -> Recorded:
        """The event, its states views of `memory`."""
        records, start = [], 0
        for record, rows in zip(self.event.records, self.rows, strict=True):
            end = start + rows * record.states.shape[1]
            records.append(replace(record, states=memory[start:end].reshape(rows, -1)))
            start = end
        return replace(self.event, records=tuple(records))
