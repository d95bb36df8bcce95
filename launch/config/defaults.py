"""Defaults that follow from other keys: from what the engine can do, and from the longest response.

Owns which keys these are. What is written stays as it is, whatever it says; whether it can be is for
launch.config.check.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from actors.engine.capabilities import BACKENDS
from launch.config.paths import replaced
from launch.config.tree import Config
from policies.presets import TRUNCATE

BACKEND = "rollout.engine.backend"


def settled(config: Config) -> tuple[Config, dict[str, str]]:
    """The configuration with these defaults, and the dotted keys that got one from the engine: where it comes from.
    One whose keys are all written, as a run's own, comes back equal."""
    origins = dict[str, str]()
    for key, value in _of_engine(config):
        if not _written(config, key):
            config = replaced(config, key, value)
            origins[key] = f"{BACKEND}: {config.rollout.engine.backend}"
    sized = config.objective.sized(config.rollout.sampling.max_new_tokens)
    return config.model_copy(update={"objective": sized}), origins


def _of_engine(c: Config) -> Iterator[tuple[str, Any]]:
    """Where its capabilities make the schema's default meaningless or impossible."""
    can, correction = BACKENDS[c.rollout.engine.backend], "objective.sampler_correction"
    if not can.learner_network and not _written(c, f"{correction}.weights"):
        yield f"{correction}.weights", "token"
        if c.objective.sampler_correction.mask == "none":
            yield f"{correction}.truncate", TRUNCATE
    if not can.batch_invariant:
        yield "rollout.speculation.verification", "rejection"
    if not can.hidden_states:
        yield "drafter.recording.source", "learner"


def _written(config: Config, key: str) -> bool:
    section: BaseModel = config
    *above, name = key.split(".")
    for part in above:
        section = getattr(section, part)
    return name in section.model_fields_set
