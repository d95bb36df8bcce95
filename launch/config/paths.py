"""Which keys are paths, and what a relative one is relative to. Looks at the file system, writes nothing."""

from pathlib import Path
from typing import Any

from launch.config.tree import Config

INPUT_PATHS = (("model", "path"), ("model", "tokenizer"), ("data", "train"), ("data", "eval"), ("warmup", "data"))


def resolve_paths(config: Config, *, config_dir: Path, cwd: Path | None = None) -> Config:
    """Absolute input paths: below the current directory if it exists there, else below the configuration's folder.

    A path found in neither place stays as it was written (`check_environment` then says where it was looked for).
    `run.dir` is an output: always relative to the current directory.
    """
    cwd = Path.cwd() if cwd is None else cwd
    for section, name in INPUT_PATHS:
        options = getattr(config, section)
        value = getattr(options, name) if options is not None else None
        if value is not None:
            config = _with(config, section, name, str(locate(value, cwd, config_dir)))
    return _with(config, "run", "dir", str(cwd / Path(config.run.dir).expanduser()))


def locate(value: str, cwd: Path, config_dir: Path) -> Path:
    path = Path(value).expanduser()
    for base in (cwd, config_dir):
        if (base / path).exists():
            return base / path
    return path


def _with(config: Config, section: str, name: str, value: Any) -> Config:
    options = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: options})
