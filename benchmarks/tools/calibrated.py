"""The initial calibration of a benchmark's choosers: what `paceline calibrate` measures, for a target in this process.

Owns only its duration, and its largest number of requests.
"""

from actors.engine.calibrated import device_name, precision_name
from actors.engine.native.measuring import Measured, Measuring
from benchmarks.tools.rollouts import engine_options
from benchmarks.tools.targets import Target
from config.speculation import SpeculationOptions
from drafter.build import build_drafters
from policies.calibration.document import Calibration, CalibrationKey
from policies.speculation.defaults import default_arms

SECONDS = 10.0
CONTEXTS = (56, 140, 24)  # tokens of a request of the demo: usual, long, short


def calibrate(target: Target, most_requests: int, seconds: float = SECONDS) -> Calibration:
    """Calibrate passes of up to `most_requests` requests, and the default strategies' drafts."""
    options = engine_options(max(most_requests, 2))
    drafters = build_drafters(SpeculationOptions(), target.model, options)
    key = CalibrationKey(
        model=target.size,
        precision=precision_name(target.dtype, "none"),
        device=device_name("cpu", options),
    )
    measuring = Measuring(target.model, options, key, drafters, default_arms(drafters), CONTEXTS)
    *_, measured = measuring.run(seconds)
    assert isinstance(measured, Measured)
    return measured.calibration
