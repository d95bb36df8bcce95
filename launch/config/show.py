"""Show a configuration: as YAML for a run folder, with sources for people."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from config.tree import Config
from launch.config.document import dump
from launch.config.load import Loaded
from launch.config.lookahead import KEY, lookahead_text
from launch.config.schema import render


def to_yaml(config: Config) -> str:
    """Return the whole resolved tree as YAML that `load_config` reads back to an equal Config."""
    return dump(config.model_dump(mode="json"))


def resolved_lines(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield (YAML line, source) of every value, defaults included. Section lines have an empty source."""
    yield from _lines(loaded.config, loaded, "", 0)


def _lines(options: BaseModel, loaded: Loaded, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for name in type(options).model_fields:
        yield from _value(getattr(options, name), name, loaded, prefix + name, "  " * depth, depth)


def _value(value: Any, label: str, loaded: Loaded, key: str, indent: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel) and isinstance(value.model_dump(), dict):
        yield f"{indent}{label}:", ""
        yield from _lines(value, loaded, f"{key}.", depth + 1)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        yield f"{indent}{label}:", ""
        for index, item in enumerate(value):
            inner = list(_lines(item, loaded, f"{key}.{index}.", depth + 2))
            first, source = inner[0]
            yield f"{indent}  - {first.lstrip()}", source
            yield from inner[1:]
    else:
        yield f"{indent}{label}: {_scalar(value)}", _source(loaded, key)


def _source(loaded: Loaded, key: str) -> str:
    """Where the value comes from; of lookahead also what it does here."""
    source, config = loaded.source(key), loaded.config
    if key != KEY or config.rollout.lookahead == "off":
        return source
    return f"{source}; {lookahead_text(config)}"


def _scalar(value: Any) -> str:
    return dump(value, flow=True) if isinstance(value, str) else render(value)
