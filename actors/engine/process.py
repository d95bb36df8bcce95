"""The parent's end of a rollout engine in a child process. Manages the child's life; never imports torch, so that its
supervisor stays small and responsive while the child computes."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.engine import wire
from actors.processes.link import Ready
from actors.processes.modules import folders
from actors.processes.parent import ChildProcess
from config.formats import Quantization
from config.model import LoraOptions, ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from contracts.engine import Command
from contracts.rollout import EngineDiedError, Event
from policies.calibration.document import Calibration
from policies.roofline.pace import Pace

NO_SPECULATION = SpeculationOptions(mode="off")
NOTHING: Mapping[str, str] = {}


class EngineStartError(RuntimeError):
    """The engine did not come up; the message is the child's own reason."""


def spawn_engine(
    model_options: ModelOptions,
    options: EngineOptions,
    *,
    seed: int = 0,
    name: str = "engine",
    weights_version: int = 0,
    start_timeout_s: float = 120.0,
    niceness: int = 5,
    speculation: SpeculationOptions = NO_SPECULATION,
    recording_bytes: int = 0,
    recorded_layers: tuple[int, ...] | None = None,
    quantization: Quantization = "none",
    lora: LoraOptions | None = None,
    gpus: Sequence[int] | None = None,
    calibrations: tuple[Calibration, ...] = (),
    calibration_path: str = "",
    truncated: bool = False,
    pace: Pace | None = None,
) -> "RolloutEngine":
    """Start an engine that serves the model at `model_options.path` and wait until it is ready.

    `seed` seeds torch in the child (sampling never uses it: noise comes with each request). `niceness` lowers the
    child's priority, so that its supervisor answers control calls at once on a machine that is busy decoding; not on
    a GPU, which would wait for it.
    `recording_bytes`, `recorded_layers`, `truncated`: see NativeEngine. `quantization`: the weights that it begins with
    are rounded to it as they are read; new ones come as they shall be, with `lora` as adapters of these. `gpus`: all
    that the child sees, by CUDA's numbers on this machine; None: those that this process sees. `calibrations`: it takes
    its own device's, if that is among them; with `calibration_path` it demands that the only one is, which lay there.
    `pace`: of experiments (policies.roofline.pace).
    Raises EngineStartError with the child's reason, or if it is not ready within `start_timeout_s`.
    """
    start = wire.Start(
        model=model_options,
        options=options,
        seed=seed,
        weights_version=weights_version,
        niceness=niceness,
        speculation=speculation,
        recording_bytes=recording_bytes,
        recorded_layers=recorded_layers,
        quantization=quantization,
        lora=lora,
        calibrations=calibrations,
        calibration_path=calibration_path,
        code_paths=tuple(folders()) if speculation.drafters else (),
        truncated=truncated,
        pace=pace,
    )
    environment = {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    engine = RolloutEngine(start, name, environment=environment)
    engine.wait_until_ready(start_timeout_s)
    return engine


class RolloutEngine:
    """An engine in a child process. Thread-safe: calls return at once, and what happened comes back through `poll`,
    which is meant for one thread."""

    def __init__(
        self,
        start: object,
        name: str,
        *,
        module: str = f"{__package__}.child",
        environment: Mapping[str, str] = NOTHING,
    ) -> None:
        """`module`: run by the child; it calls `actors.engine.child.serve` with a core made from `start`."""
        self.name = name
        self._child = ChildProcess(module, start, name, died=EngineDiedError, environment=dict(environment))

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the child. Raises EngineStartError if it fails first, or is not ready in time; it is killed then."""
        try:
            (first,) = self._child.first(timeout_s)
            if not isinstance(first, Ready):
                raise EngineStartError(first.reason)
        except (TimeoutError, EngineDiedError) as error:
            self.close(timeout_s=0.0)
            raise EngineStartError(str(error)) from None
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    def send(self, command: Command, memory: NDArray[np.uint8] | None = None) -> None:
        """`memory` is copied and may be reused when this returns. Raises EngineDiedError if it died."""
        self._child.send((command, memory))

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call, waiting up to timeout_s for the first. Raises EngineDiedError if it died."""
        return [event for events in self._child.poll(timeout_s) for event in events]

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child: first by request, then by kill after `timeout_s`. Idempotent."""
        self._child.close(timeout_s)
