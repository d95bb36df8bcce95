"""The configuration as tables of all keys, the body of docs/reference/configuration.md. Never reads a value."""

import re
from collections.abc import Iterator, Mapping

from launch.config.schema import Key, keys

Known = dict[tuple[str, str, str], str]  # last part of the name, value and description -> the first section with it
_CAP = 10_000  # a larger upper bound only guards against typing errors; the page leaves it out
_SIGNS = {">=": "from", ">": "above", "<=": "to", "<": "below"}


def schema_markdown() -> str:
    """Return every key with default, allowed values and description as Markdown, one table per section."""
    lines: list[str] = []
    known: Known = {}
    for section in (key for key in keys() if key.section is not None):
        lines += ["", f"### `{section.name}`", "", section.description, ""]
        lines += ["| key | default, value | meaning |", "|---|---|---|"]
        own = [key for key in keys() if key.section is None and _parent(key.name) == section.name]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in _rows(own, known)]
        for key in own:
            known.setdefault(_identity(key), section.name)
    return "\n".join(lines).strip() + "\n"


def _rows(own: list[Key], known: Mapping[tuple[str, str, str], str]) -> Iterator[tuple[str, str, str]]:
    """Yield table rows. Keys that repeat another section's keys, or take their defaults from it, share a row."""
    shared: dict[str, list[Key]] = {}
    for key in own:
        default = re.fullmatch(r"default: ([\w.]+)\.(\w+)", key.description)
        if default is not None and default[2] == _last(key.name):
            shared.setdefault(f"default: as in `{default[1]}`", []).append(key)
        elif (where := known.get(_identity(key))) is not None:
            shared.setdefault(f"as in `{where}`", []).append(key)
    meanings = {key.name: meaning for meaning, members in shared.items() for key in members if len(members) > 1}
    for key in own:
        meaning = meanings.get(key.name)
        if meaning is None:
            yield f"`{key.name}`", _value(key), key.description
        elif key is shared[meaning][0]:
            yield ", ".join(f"`{each.name}`" for each in shared[meaning]), "", meaning


def _value(key: Key) -> str:
    """Return the default, then other allowed values: "`16`, from 1", "`coupled`, rejection", "`null`, text"."""
    default = "required" if key.required else f"`{key.default_text}`"
    if isinstance(key.default, bool):
        return default
    kind = key.expected.removeprefix("a ").removeprefix("an ").replace("true or false", "boolean")
    if key.default is None and not key.required:
        kind = kind.removesuffix(" or null")
    kind = re.sub(r"(?:, (?:>=|>|<=|<) \S+(?<!,))+", _range, kind.replace("one of ", ""))
    kind = ", ".join(choice for choice in kind.split(", ") if choice != key.default)
    kind = kind.removeprefix(f"{key.default} or a ")
    if isinstance(key.default, int | float):
        kind = re.sub(r"^(?:integer|number) ?", "", kind)
    return f"{default}, {kind}" if kind else default


def _range(match: re.Match[str]) -> str:
    """Rewrite `, >= 1, <= 8` as ` 1 to 8`, and `, > 0` as ` above 0`."""
    bounds = [bound.split(" ") for bound in match[0].removeprefix(", ").split(", ")]
    text = "".join(f" {_SIGNS[sign]} {number}" for sign, number in bounds if sign[0] == ">" or float(number) < _CAP)
    return text.replace(" from ", " ", 1) if " to " in text else text


def _identity(key: Key) -> tuple[str, str, str]:
    return _last(key.name), _value(key), key.description


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    """Return the section of a key: `reward.terms.*.kind` -> `reward.terms`."""
    return name.rpartition(".")[0].removesuffix(".*")
