"""Load a YAML file and overrides into one validated `Config`. Owns the order of the steps and how faults are reported.

The steps: parse the file, apply overrides, validate types and ranges, check keys against each other, resolve
relative paths and defaults that follow from other keys. Every fault of the first three steps is reported at once.
Cross-checks need a typed tree.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from config.tree import Config
from launch.config.check import check_values
from launch.config.defaults import implied, settled
from launch.config.document import Document, KeyPath, parse_document
from launch.config.foreign.answers import plain
from launch.config.foreign.lookup import elsewhere
from launch.config.issues import ConfigError, Issue
from launch.config.overrides import apply_overrides
from launch.config.paths import resolve_paths
from launch.config.schema import by_name, generic, nearest, render

_OFF = {  # overrides that switch off sections with a default
    "drafter": "drafter.train=false",
    "rollout.speculation": "rollout.speculation.mode=off",
    "rollout.abort": "rollout.abort.enabled=false",
    "objective.sampler_correction": "objective.sampler_correction.weights=none",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    path: Path
    places: dict[KeyPath, str]  # "file.yaml:12" or "override"; keys that are absent have their default
    origins: Mapping[str, str]  # dotted key -> the key and value that its default follows from

    def source(self, name: str) -> str:
        """Return the source of the dotted key `name`: `file.yaml:12`, `override`, another key, or `default`."""
        place = self.places.get(tuple(name.split("."))) or self.origins.get(name)
        section, _, key = name.partition(".")
        return place or (section == "objective" and self.config.objective.origin(key)) or "default"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, training: bool = True) -> Loaded:
    """Read, validate and resolve a configuration. Raises ConfigError with every fault found. `training`: false if the
    command trains nothing; then missing training data is no fault."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([Issue("", f"no such configuration file: {path}")], remedy=_similar(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Issue("", f"cannot read {path}: {error}")]) from error
    return _loaded(parse_document(text, str(path)), path, overrides, training)


def load_values(values: dict[str, Any], name: str, overrides: Sequence[str] = (), *, training: bool = True) -> Loaded:
    """Resolve values that come from no file. `name` stands for the file in messages."""
    return _loaded(Document(values), Path(name), overrides, training, folder=Path.cwd())


def _loaded(
    document: Document, path: Path, overrides: Sequence[str], training: bool, folder: Path | None = None
) -> Loaded:
    apply_overrides(document, overrides)
    implications = implied(document.values)
    config, issues = validate(document, str(path))
    known = {issue.key for issue in document.issues}
    issues = [issue for issue in issues if issue.key not in known]  # e.g. a rejected value is also missing
    if config is None or document.issues or issues:
        raise ConfigError([*document.issues, *issues], remedy=_remedy(issues))
    config, origins = settled(config)
    faults = [
        Issue(i.key, i.message, document.places.get(tuple(i.key.split(".")), ""), i.remedy)
        for i in check_values(config, training=training)
    ]
    if faults:
        raise ConfigError(faults)
    resolved = resolve_paths(config, config_dir=folder or path.resolve().parent)
    return Loaded(resolved, path, document.places, implications | origins)


def _remedy(issues: Sequence[Issue]) -> str:
    """Return the overrides that replace another trainer's keys, to be pasted."""
    said = dict.fromkeys(each for issue in issues for each in shlex.split(issue.ours))
    if sum(bool(issue.ours) for issue in issues) < 2:
        return "all keys: paceline config --schema"
    by_key: dict[str, list[str]] = {}
    for each in said:
        by_key.setdefault(each.partition("=")[0], []).append(each)
    pasted = " ".join(shlex.quote(values[0]) for values in by_key.values() if len(values) == 1)
    lines = [f"in Paceline's keys: {pasted}"]
    lines += [f"choose one: {' or '.join(values)}" for values in by_key.values() if len(values) > 1]
    return "\n".join([*lines, "other names: docs/reference/coming_from.md"])


def validate(document: Document, name: str) -> tuple[Config | None, list[Issue]]:
    """Check types, ranges and names of a parsed document. Strict JSON rules: text is never read as a number."""
    if any(not issue.key for issue in document.issues) and not document.values:
        return None, []  # not YAML at all: "run is missing" would be noise
    if endless := [_endless(path, value, document) for path, value in _floats((), document.values)]:
        return None, endless
    try:
        return Config.model_validate_json(json.dumps(document.values), strict=True), []
    except ValidationError as error:
        faults = error.errors(include_url=False)
        inner = {details["loc"][:depth] for details in faults for depth in range(len(details["loc"]))}
        # A list whose elements were rejected is also "too short": that is noise.
        faults = [d for d in faults if d["type"] != "too_short" or d["loc"] not in inner]
        return None, [issue for details in faults for issue in _issues(details, document, name)]


def _floats(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, float]]:
    """Yield every number of a document that is not finite: no key accepts one."""
    if isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _floats((*path, str(part)), inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value


def _endless(path: KeyPath, value: float, document: Document) -> Issue:
    return Issue(".".join(path), f"expected a finite number; got {value}", _place(document, path))


def _issues(details: ErrorDetails, document: Document, name: str) -> Iterator[Issue]:
    path = tuple(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        yield from _unknown(path, details["input"], document)
    else:
        yield _issue(details, path, document, name)


def _unknown(path: KeyPath, value: Any, document: Document) -> Iterator[Issue]:
    """Yield one issue for each key below `path` if one of them is another trainer's, else one for `path`."""
    written = {plain(".".join(parts)): leaf for parts, leaf in leaves((), document.values)}
    answers = [(parts, elsewhere(".".join(parts), leaf, written)) for parts, leaf in leaves(path, value)]
    if not any(theirs for _, (theirs, _) in answers):
        answers = [(path, ("", ""))]
    for parts, (theirs, ours) in answers:
        key = ".".join(parts)
        near = "" if theirs else nearest(key)
        yield Issue(key, "unknown key", _place(document, parts), f"did you mean {near}?" if near else theirs, ours)


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of everything that is no mapping."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves((*path, key), inner)
    else:
        yield path, value


def _issue(details: ErrorDetails, path: KeyPath, document: Document, name: str) -> Issue:
    key = ".".join(path)
    where = _place(document, path)
    known = by_name().get(generic(key)) or by_name().get(generic(".".join(path[:-1])))
    about = f"{known.expected}" if known else details["msg"]
    if details["type"] == "missing":
        about = f"{about}: {known.description}" if known and known.description else about
        return Issue(key, f"required and missing; expected {about}", where or name)
    remedy = f"{known.description}" if known else ""
    if details["input"] is None and known is not None and known.section is not None:
        remedy = f"set {_OFF[key]}" if key in _OFF else "leave it out: its keys then have their defaults"
    return Issue(key, f"expected {about}; got {_quoted(details['input'])}", where, remedy)


def _place(document: Document, path: KeyPath) -> str:
    """Return the place of the key, of a value below it, or of the innermost enclosing section in the document."""
    for known, where in document.places.items():
        if known[: len(path)] == path:
            return where
    while path and path not in document.places:
        path = path[:-1]
    return document.places.get(path, "")


def _quoted(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else render(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _similar(path: Path) -> str | None:
    folder = path.parent if path.parent.is_dir() else Path()
    found = sorted(str(p) for p in folder.glob("*.yaml"))[:5]
    return f"configurations there: {', '.join(found)}" if found else None
