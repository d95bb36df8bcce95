"""Start messages between a spot trainer and its child, besides commands and events. Plain data."""

from dataclasses import dataclass

from config.drafter import DrafterOptions
from config.model import ModelOptions
from policies.roofline.pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStart:
    """First message to a child."""

    model: ModelOptions
    options: DrafterOptions
    init: str | int  # directory of a drafter, or seed of a fresh one
    checkpoint_dir: str
    host: str  # address of this one for other members
    threads: int | None
    device: str
    niceness: int
    pace: Pace | None = None  # for experiments
