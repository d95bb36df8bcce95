"""Which keys are paths, and what a relative one is relative to. Looks at the file system, writes nothing."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from launch.config.tree import Config
from policies.speculation.catalogue import FRESH_WEIGHTS

INPUT_PATHS = (
    "model.path",
    "model.tokenizer",
    "data.train",
    "data.eval",
    "warmup.data",
    "rollout.speculation.eagle.path",
    "rollout.speculation.calibration",
    "coordinator.curve.directory",
    "coordinator.admin.certificate",
    "coordinator.admin.key",
)
NO_PATHS = (FRESH_WEIGHTS, "auto", "off")  # words that such a key takes instead of one
M = TypeVar("M", bound=BaseModel)


def resolve_paths(config: Config, *, config_dir: Path, cwd: Path | None = None) -> Config:
    """Absolute input paths: below the current directory if it exists there, else below the configuration's folder.

    A path found in neither place stays as it was written (`check_environment` then says where it was looked for).
    `run.dir` is an output: always relative to the current directory.
    """
    cwd = Path.cwd() if cwd is None else cwd
    for key in INPUT_PATHS:
        value = _value(config, key)
        if value is not None and value not in NO_PATHS:
            config = replaced(config, key, str(locate(value, cwd, config_dir)))
    return replaced(config, "run.dir", str(cwd / Path(config.run.dir).expanduser()))


def locate(value: str, cwd: Path, config_dir: Path) -> Path:
    path = Path(value).expanduser()
    for base in (cwd, config_dir):
        if (base / path).exists():
            return base / path
    return path


def _value(options: BaseModel, key: str) -> str | None:
    name, _, rest = key.partition(".")
    value = getattr(options, name)
    return _value(value, rest) if rest and value is not None else value


def replaced(options: M, key: str, value: object) -> M:
    """A copy in which the dotted key has that value."""
    name, _, rest = key.partition(".")
    return options.model_copy(update={name: replaced(getattr(options, name), rest, value) if rest else value})


def tokenizer_dir(config: Config) -> str:
    return config.model.tokenizer or config.model.path
