"""Defaults that follow from other keys: engine capabilities, the longest response, a budget, staleness.

Owns which keys these are. A written value stays as it is, whatever it says; launch.config.check decides whether it is
allowed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from actors.engine.capabilities import capabilities_of
from config.presets import TRUNCATE
from config.tree import Config
from launch.config.check_lengths import markers_of
from launch.config.paths import replaced

BACKEND = "rollout.engine.backend"
JUDGE_S = 60.0  # reward.terms.*.timeout_s of a judge


def implied(values: dict[str, Any]) -> dict[str, str]:
    """Write the better defaults that a document's own values imply, where nothing is written. Returns the source of
    each new value by dotted key. An invalid document is left as it is."""
    return _objective_name(values) | _own_reward(values) | _first_answers(values) | _patience(values)


def _objective_name(values: dict[str, Any]) -> dict[str, str]:
    """Choose an objective that a budget or early ends do not bias."""
    rollout, objective = values.get("rollout"), values.get("objective") or {}
    if not isinstance(rollout, Mapping) or not isinstance(objective, Mapping) or "name" in objective:
        return {}
    budget, abort = rollout.get("budget") or {}, rollout.get("abort") or {}
    sizes = [key for key in ("tokens_per_step", "share") if isinstance(budget, Mapping) and budget.get(key) is not None]
    if sizes:
        origin = f"rollout.budget.{sizes[0]}: {budget[sizes[0]]}"
    elif isinstance(abort, Mapping) and abort.get("enabled") is True:
        origin = "rollout.abort.enabled: true"
    else:
        return {}
    values["objective"] = {"name": "duet", **objective}
    return {"objective.name": origin}


def _first_answers(values: dict[str, Any]) -> dict[str, str]:
    """Grade the first answer if responses end behind it."""
    rollout = values.get("rollout")
    abort = rollout.get("abort") if isinstance(rollout, Mapping) else None
    reward = values.get("reward") or {}
    if not (isinstance(abort, Mapping) and abort.get("enabled") is True and isinstance(reward, Mapping)):
        return {}
    terms = reward.get("terms", [{"kind": "math"}])
    if not isinstance(terms, list):
        return {}
    first = [_reads_first(term) for term in terms]
    values["reward"] = {**reward, "terms": first}
    changed = [i for i, (new, written) in enumerate(zip(first, terms, strict=True)) if new != written]
    return {f"reward.terms.{i}.answer": "rollout.abort.enabled: true" for i in changed}


def _own_reward(values: dict[str, Any]) -> dict[str, str]:
    """Choose the default reward: an environment rewards its own turns, reasoning-gym's data sets grade answers."""
    environment, data, reward = (values.get(name) or {} for name in ("environment", "data", "reward"))
    if not isinstance(reward, Mapping) or "terms" in reward:
        return {}
    if isinstance(environment, Mapping) and environment.get("factory"):
        term, origin = {"kind": "environment"}, "environment.factory"
    elif isinstance(data, Mapping) and data.get("reasoning_gym"):
        term, origin = {"kind": "reasoning_gym", "fallback": "auto"}, "data.reasoning_gym"
    else:
        return {}
    values["reward"] = {**reward, "terms": [term]}
    return {"reward.terms": origin}


def _reads_first(term: Any) -> Any:
    reads = isinstance(term, Mapping) and term.get("kind") in ("math", "code")
    return {"answer": "first", **term} if reads else term


def _patience(values: dict[str, Any]) -> dict[str, str]:
    """Give a judge more time, since a language model takes longer than a function."""
    reward = values.get("reward")
    terms = reward.get("terms") if isinstance(reward, Mapping) else None
    origins = dict[str, str]()
    for index, term in enumerate(terms if isinstance(terms, list) else ()):
        if isinstance(term, dict) and term.get("kind") == "judge" and "timeout_s" not in term:
            term["timeout_s"] = JUDGE_S
            origins[f"reward.terms.{index}.timeout_s"] = f"reward.terms.{index}.kind: judge"
    return origins


def settled(config: Config) -> tuple[Config, dict[str, str]]:
    """Return the configuration with these defaults, and the source of each new value by dotted key. A configuration
    with all keys written, such as a run's own, comes back equal."""
    origins = dict[str, str]()
    for source, key, value in (*_of_engine(config), *_of_staleness(config)):
        if not _written(config, key):
            config = replaced(config, key, value)
            origins[key] = source
    if config.rollout.abort.enabled and config.rollout.abort.marker is None and len(read := markers_of(config)) == 1:
        config = replaced(config, "rollout.abort.marker", read[0])
        origins["rollout.abort.marker"] = "reward.terms"
    sized = config.objective.sized(config.rollout.sampling.max_new_tokens)
    return config.model_copy(update={"objective": sized}), origins


def _of_engine(c: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield (source, key, value) where the engine makes the schema's default meaningless or impossible."""
    can, source = capabilities_of(c), f"{BACKEND}: {c.rollout.engine.backend}"
    if not can.learner_network:
        yield from ((source, key, value) for key, value in _corrected(c))
    if not can.batch_invariant:
        yield source, "rollout.speculation.verification", "rejection"
    if not can.hidden_states:
        yield source, "drafter.recording.source", "learner"


def _of_staleness(c: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield the same for staleness: responses of an older policy get importance weights."""
    r = c.rollout
    if r.staleness or r.partial.tokens_per_step is not None:
        own = f"partial.tokens_per_step: {r.partial.tokens_per_step}"
        source = f"rollout.staleness: {r.staleness}" if r.staleness else f"rollout.{own}"
        yield from ((source, key, value) for key, value in _corrected(c))


def _corrected(c: Config) -> Iterator[tuple[str, Any]]:
    """Yield truncated per-token importance weights, unless others are written."""
    correction = "objective.sampler_correction"
    if not _written(c, f"{correction}.weights"):
        yield f"{correction}.weights", "token"
        if c.objective.sampler_correction.mask == "none":
            yield f"{correction}.truncate", TRUNCATE


def _written(config: Config, key: str) -> bool:
    section: BaseModel = config
    *above, name = key.split(".")
    for part in above:
        section = getattr(section, part)
    return name in section.model_fields_set
