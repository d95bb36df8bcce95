"""An engine's calibration: how it finds its own among those given, and what it reports about its passes.

Defines the names by which calibrations are found, and when the driver receives news. `policies.calibration` measures
and predicts. Imports torch only to name a device.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engine.wire import Start
from config.formats import Quantization
from config.model import ModelOptions
from config.rollout import EngineOptions
from contracts.rollout import EngineWindow, PassesDrifted, PassesKnown, PassesRefined, PassEvent
from models.config import ModelConfig, ModelConfigError, read_config
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey
from policies.calibration.roofline import PROCESSOR, UNKNOWN_GPU, FreeRows
from policies.roofline.devices import device_named
from policies.roofline.pace import Pace

KEY = "rollout.speculation.calibration"
REFINED_S = 5.0  # after so long what was learned is told again, when the engine idles
DRIFT_RATIO = 1.4  # by which passes must have become slower or faster, against what was said last ...
DRIFT_STEPS, DRIFT_S = 64, 2.0  # ... for at least so many steps and so long, to be worth a word
_SPREAD = 0.7
_NO_SHAPE = ("_token_id", "_token_ids", "max_position_embeddings")  # integers of a config.json that do not affect cost


def model_shape(path: str | Path) -> str:
    """Return a description of the model's shape: equal for equal networks, trained or not.

    Raises ModelConfigError."""
    raw = read_config(path)
    try:
        config = ModelConfig.from_hf(raw)
    except ModelConfigError:
        return _any_shape(raw)
    biases = [name for name in ("qkv_bias", "output_bias", "mlp_bias") if getattr(config, name)]
    return ", ".join(
        (
            config.family,
            f"{config.num_layers} layers of {config.hidden_size}",
            f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}",
            f"inner {config.intermediate_size}",
            f"vocabulary {config.vocab_size}" + (", tied" if config.tied else ""),
            *biases,
        )
    )


def _any_shape(raw: Mapping[str, Any]) -> str:
    """Describe an unsupported architecture: hash everything in its config.json that may be a size."""
    sizes = {
        name: value for name, value in raw.items() if isinstance(value, int | dict) and not name.endswith(_NO_SHAPE)
    }
    digest = hashlib.blake2b(json.dumps(sizes, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
    architecture = ", ".join(map(str, raw.get("architectures") or ["unknown"]))
    return f"{architecture} {digest}"


def precision_name(dtype: str, quantization: str) -> str:
    """Return the precision's name: `float32`, `float32 w8a8`."""
    return dtype if quantization == "none" else f"{dtype} {quantization}"


def device_name(device: str, options: EngineOptions, engine: str = "") -> str:
    """Return what computes in this process: processor, kernels (level and build: others take other times) and threads,
    or GPU; and the engine, if it is not ours."""
    import torch

    ranks = options.tensor_parallel or 1
    if ranks > 1:
        engine = ", ".join(filter(None, (f"{ranks} ranks", engine)))
    if device == "cuda":
        parts = [torch.cuda.get_device_name()]
        if options.backend == "native" and not options.cuda_graphs:
            parts.append("eager")
    else:
        threads = torch.get_num_threads()
        parts = [_processor(), _level(), f"{threads} thread{'s' if threads > 1 else ''}"]
    return ", ".join(filter(None, (*parts, engine)))


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")


def _level() -> str:
    from models.ops.native import kernel_stamp, kernels

    return "no native kernels" if kernels is None else f"{kernels.cpu_level()} {kernel_stamp()}".rstrip()


def calibration_key(
    model: ModelOptions, options: EngineOptions, quantization: Quantization, device: str, engine: str = ""
) -> CalibrationKey:
    """Return the key of such an engine in this process on `device`, cpu or cuda. Raises ModelConfigError."""
    return CalibrationKey(
        model=model_shape(model.path),
        precision=precision_name(model.dtype, quantization),
        device=device_name(device, options, engine),
    )


def calibrated(start: Start, device: str, engine: str = "") -> tuple[CostModel, "PassNews"]:
    """Return the cost model of the engine that `start` describes, and its reports to the driver.

    For this process on `device`, cpu or cuda. `engine`: its name and release, if it is not ours. Raises
    ModelConfigError, and ValueError if a calibration was required and is another engine's.
    """
    key = calibration_key(start.model, start.options, start.quantization, device, engine)
    if start.pace is not None:
        key = key.model_copy(update={"device": start.pace.name})
    own = own_calibration(start, key)
    costs = CostModel(own, free_rows(device, start.pace))
    return costs, PassNews(costs, key, own)


def free_rows(device: str, pace: Pace | None) -> FreeRows:
    """Return what is known of `device`, or of the device that is paced to, before any measurement."""
    if pace is None and device != "cuda":
        return PROCESSOR
    import torch

    known = device_named(torch.cuda.get_device_name() if pace is None else pace.device)
    return UNKNOWN_GPU if known is None else FreeRows(known.free_rows, _SPREAD)


def own_calibration(start: Start, key: CalibrationKey) -> Calibration | None:
    """Return the calibration of `key` among the given ones. Raises ValueError if one was required and is another
    engine's."""
    for calibration in start.calibrations:
        if calibration.key == key:
            return calibration
    if not start.calibration_path:
        return None
    given = start.calibrations[0].key
    raise ValueError(
        f"{KEY}={start.calibration_path} is of another engine: {'; '.join(given.differences(key))}; set {KEY}=auto, or "
        "make one here with `paceline calibrate`"
    )


class PassNews:
    """Reports about one engine's passes, made whenever a window of its telemetry ends."""

    def __init__(self, costs: CostModel, key: CalibrationKey, calibration: Calibration | None) -> None:
        """calibration: the initial one of `costs`."""
        self._costs, self._key, self._calibrated = costs, key, calibration is not None
        passes = 0 if calibration is None else len(calibration.passes)
        self._first: PassEvent | None = PassesKnown(key, passes)
        self._steps = 0
        self._told_steps, self._told_s = 0, 0.0
        self._said = 1.0
        self._away_steps, self._away_s = 0, 0.0  # steps since, and time when, the factor changed

    def after_window(self, window: EngineWindow, *, idle: bool) -> list[PassEvent]:
        """Return new reports. `idle`: no work is left."""
        self._steps += window.engine_steps
        found: list[PassEvent] = []
        if self._first is not None:
            found.append(self._first)
            self._first, self._told_s = None, window.end_s
        if self._calibrated and (drifted := self._drifted(window)) is not None:
            found.append(drifted)
        # The first steps are the most informative: early reports are more frequent.
        if idle and (self._steps >= 2 * self._told_steps or window.end_s - self._told_s >= REFINED_S):
            self._told_steps, self._told_s = self._steps, window.end_s
            refined = self._costs.refined(self._key)
            if refined.passes:
                found.append(PassesRefined(refined))
        return found

    def _drifted(self, window: EngineWindow) -> PassesDrifted | None:
        factor, said = self._costs.drift, self._said
        if said / DRIFT_RATIO < factor < said * DRIFT_RATIO:
            self._away_steps = 0
            return None
        if not self._away_steps:
            self._away_s = window.end_s
        self._away_steps += window.engine_steps
        if self._away_steps < DRIFT_STEPS or window.end_s - self._away_s < DRIFT_S:
            return None
        self._said, self._away_steps = factor, 0
        return PassesDrifted(factor, said)
