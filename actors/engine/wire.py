"""Start messages between a process engine and its child, besides commands and events. Plain data."""

from dataclasses import dataclass

from config.formats import Quantization
from config.model import LoraOptions, ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from policies.calibration.document import Calibration
from policies.roofline.pace import Pace


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
    truncated: bool = False  # some requests will have top-k or top-p
    pace: Pace | None = None  # of experiments: parts last as long as on another device
