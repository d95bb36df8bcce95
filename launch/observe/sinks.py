"""Destinations of scalars besides the files: TensorBoard, Ray metrics, Weights & Biases. Each imports its library
lazily.
"""

import json
import math
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from config.installed import install_extra
from launch.config import Config
from launch.errors import PacelineError


class TensorBoardSink:
    """Event files without torch's or TensorFlow's writer. They hold scalars, responses as texts, and the configuration
    as hyperparameters for comparing runs. On resume, later steps of older files are purged."""

    def __init__(self, folder: Path, config: Config, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder))
        if first_step > 1:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))
        else:
            chosen = hparams_pb(dict(hyperparameters(config.model_dump(mode="json"))), trial_id=config.run.name)
            self._writer.add_event(Event(wall_time=time.time(), summary=chosen))
            self._writer.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text.encode() for text in texts])
        metadata = create_summary_metadata(display_name="", description="")
        value = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._writer.close()


def hyperparameters(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yield dotted keys and values that TensorBoard accepts; unset values are left out."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from hyperparameters(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
        elif value is not None:
            yield f"{prefix}{name}", json.dumps(value)


class RaySink:
    """Gauges `paceline_<metric>` with the tag `run`. Ray exports them to Prometheus as `ray_paceline_<metric>`, and
    grafana.json, in this folder, draws them.

    Silent while Ray is not up; Ray may start and stop during the life of a sink.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.set({"rl_step": float(step), **values})

    def set(self, values: Mapping[str, float], **tags: str) -> None:
        """Set current values, with further tags besides `run`. A name must have the same tags every time."""
        ray = sys.modules.get("ray")  # importing it takes a second; if it is not imported, it is not initialised
        if ray is None or not ray.is_initialized():
            return
        from ray.util.metrics import Gauge

        for name, value in values.items():
            if not math.isfinite(value):
                continue
            if name not in self._gauges:
                label = "paceline_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                self._gauges[name] = Gauge(label, description=f"Paceline: {name}", tag_keys=("run", *tags))
            self._gauges[name].set(value, tags={"run": self._run, **tags})

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        """Do nothing, since gauges are numbers."""

    def close(self) -> None:
        self._gauges.clear()


class WandbSink:
    """One W&B run per run folder; resuming continues it. A later run of the same name, in another folder, is a separate
    W&B run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise PacelineError(
                "observe.wandb_project is set, but wandb is not installed", remedy=install_extra("wandb")
            ) from error
        known = run_dir / "wandb_id"
        if not known.is_file():
            known.write_text(f"{re.sub(r'[^a-zA-Z0-9_-]', '-', config.run.name)}-{secrets.token_hex(4)}")
        try:
            self._run: Any = wandb.init(
                project=config.observe.wandb_project,
                name=config.run.name,
                id=known.read_text().strip(),
                resume="allow",
                dir=str(run_dir),
                config=config.model_dump(mode="json"),
            )
        except Exception as error:  # its own classes, for a missing key, network or project
            raise PacelineError(
                f"W&B cannot be used: {error}",
                remedy="run `wandb login`, set WANDB_MODE=offline, or unset observe.wandb_project",
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        """Do nothing: a table of texts costs more than it shows. The report has the texts."""

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoardSink | RaySink | WandbSink  # steps arrive in ascending order, from one thread at a time


def open_sinks(run_dir: Path, config: Config, *, first_step: int) -> list[Sink]:
    """Open the sinks that the configuration asks for. `first_step`: the first that will be written."""
    sinks: list[Sink] = []
    if config.observe.wandb_project is not None:
        sinks.append(WandbSink(run_dir, config))
    if config.observe.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", config, first_step=first_step))
    return sinks
