"""What passes between a process engine and its child over `actors.processes.link`. Plain data."""

from dataclasses import dataclass

from actors.engine.options import EngineOptions
from actors.engine.types import Capabilities, IntArray, Request
from models.manifest import WeightsManifest
from models.options import ModelOptions
from policies.speculation.options import SpeculationOptions


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a child."""

    model: ModelOptions
    options: EngineOptions
    seed: int
    weights_version: int
    niceness: int
    speculation: SpeculationOptions


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """With the weights as memory."""

    manifest: WeightsManifest


@dataclass(frozen=True, slots=True)
class Sleep:
    pass


@dataclass(frozen=True, slots=True)
class Wake:
    pass


@dataclass(frozen=True, slots=True)
class Remember:
    """Rollouts that other engines finished, for the drafters."""

    prompts: tuple[IntArray, ...]
    responses: tuple[IntArray, ...]


@dataclass(frozen=True, slots=True)
class SaveDrafters:
    directory: str


@dataclass(frozen=True, slots=True)
class LoadDrafters:
    directory: str


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Start | Submit | Abort | UpdateWeights | Sleep | Wake | Remember | SaveDrafters | LoadDrafters | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """First message from a child that came up."""

    capabilities: Capabilities
