"""Keys that are paths, and how relative ones are resolved. Looks at the file system, writes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from config.catalogue import FRESH_WEIGHTS
from config.tree import Config

INPUT_PATHS = (
    "model.path",
    "model.tokenizer",
    "data.train",
    "data.sets.*.path",
    "data.success.file",
    "data.eval",
    "eval.sets.*.path",
    "warmup.data",
    "learner.lora.path",
    "rollout.speculation.eagle.path",
    "rollout.speculation.mtp.path",
    "rollout.speculation.dflash.path",
    "rollout.speculation.peagle.path",
    "rollout.speculation.calibration",
    "coordinator.curve.directory",
    "coordinator.admin.certificate",
    "coordinator.admin.key",
)
NO_PATHS = (FRESH_WEIGHTS, "auto", "off")  # words that such a key accepts instead of a path
M = TypeVar("M", bound=BaseModel | tuple[BaseModel, ...])


def resolve_paths(config: Config, *, config_dir: Path, cwd: Path | None = None) -> Config:
    """Make input paths absolute: below the current directory if they exist there, else below the configuration's
    folder.

    A path found in neither place stays as written (`check_environment` then says where it was searched). `run.dir` is
    an output: always relative to the current directory.
    """
    cwd = Path.cwd() if cwd is None else cwd
    for pattern in INPUT_PATHS:
        for key, value in list(written(config, pattern)):
            if value is not None and value not in NO_PATHS:
                config = replaced(config, key, str(locate(value, cwd, config_dir)))
    return replaced(config, "run.dir", str(cwd / Path(config.run.dir).expanduser()))


def locate(value: str, cwd: Path, config_dir: Path) -> Path:
    path = Path(value).expanduser()
    for base in (cwd, config_dir):
        if (base / path).exists():
            return base / path
    return path


def written(options: Any, pattern: str) -> Iterator[tuple[str, str | None]]:
    """Yield (dotted key, value) of every key that a pattern of INPUT_PATHS matches; `*` is each position of a list."""
    name, _, rest = pattern.partition(".")
    names = map(str, range(len(options))) if name == "*" else [name]
    for one in names:
        value = options[int(one)] if name == "*" else getattr(options, one)
        if not rest or value is None:
            yield one, value
        else:
            yield from ((f"{one}.{inner}", found) for inner, found in written(value, rest))


def replaced(options: M, key: str, value: object) -> M:
    """Return a copy in which the dotted key has that value."""
    name, _, rest = key.partition(".")
    if isinstance(options, tuple):
        at = int(name)
        return cast(M, (*options[:at], replaced(options[at], rest, value), *options[at + 1 :]))
    return options.model_copy(update={name: replaced(getattr(options, name), rest, value) if rest else value})


def tokenizer_dir(config: Config) -> str:
    return config.model.tokenizer or config.model.path
