"""YAML text as plain values plus the place of every key. Knows YAML, not the configuration tree.

Scalars follow YAML 1.2: only `true`/`false` are booleans (not yes, no, on, off), `1e-6` is a number, and nothing
becomes a date. Duplicate keys, tags and merge keys are faults: each would make the file mean something unexpected.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from launch.config.issues import Issue

MAX_VALUES = 20_000  # in a whole document, with aliases expanded
MAX_DEPTH = 24  # the tree needs a third of it
MAX_DIGITS = 1000  # a longer number becomes text, which no numeric key accepts (Python reads 4,300 at most)
KeyPath = tuple[str, ...]  # list positions are written as digits: ("reward", "terms", "0", "kind")

_BRACKETS = re.compile(r"[][{}]")
_MOST_OPEN = 500  # brackets, including those within texts
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_PLAIN_TAGS = {"null", "bool", "int", "float", "str", "timestamp", "value", "merge", "map", "seq"}


@dataclass(slots=True)
class Document:
    """Values (dict, list, str, int, float, bool, None), the place of each key, and the faults found on the way."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)


def parse_document(text: str, name: str) -> Document:
    """Parse a configuration file. Places start with `name`. Faults are returned, not raised."""
    document = Document()
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        document.issues.append(Issue("", f"not valid YAML: {error.problem or error.context}", where))
        return document
    except yaml.YAMLError as error:
        document.issues.append(Issue("", f"not valid YAML: {error}", name))
        return document
    if node is None:
        document.issues.append(Issue("", "the file is empty", name, "it needs at least run, model and data"))
    elif not isinstance(node, yaml.MappingNode):
        document.issues.append(Issue("", "the top level must be a mapping of sections", name))
    else:
        document.values = _Builder(name, document).mapping(node, (), ())
    return document


def _compose(text: str) -> yaml.Node | None:
    depth = 0
    for bracket in _BRACKETS.findall(text):  # checked first: the scanner's time grows with the square of the depth
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > _MOST_OPEN:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels") from None
    return node


def parse_value(text: str) -> Any:
    """Parse a YAML value given on the command line. Raises ValueError with the reason."""
    document = Document()
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        shown = text if len(text) < 80 else f"{text[:80]}..."
        raise ValueError(
            f"not a YAML value: {shown!r}; a text needs quotes within the shell's, KEY='\"TEXT\"'"
        ) from error
    value = None if node is None else _Builder("override", document).value(node, (), ())
    if document.issues:
        raise ValueError(document.issues[0].message)
    return value


def dump(value: Any, *, flow: bool = False) -> str:
    """Return YAML that `parse_document` and `parse_value` read back unchanged. `flow`: on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, width=10_000 if flow else 120, default_flow_style=flow
    )
    return text.removesuffix("\n...\n").removesuffix("\n") if flow else text


class _Dumper(yaml.SafeDumper):
    """Quotes texts that only YAML 1.2 reads as numbers, such as 1e6."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quote = None if isinstance(_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quote)


_Dumper.add_representer(str, _represent_text)


class _Builder:
    def __init__(self, name: str, document: Document) -> None:
        self._name = name
        self._document = document
        self._left = MAX_VALUES

    def value(self, node: yaml.Node, path: KeyPath, open_nodes: tuple[int, ...]) -> Any:
        self._left -= 1
        if self._left <= 0:
            if self._left == 0:
                self._fault(node, (), f"more than {MAX_VALUES:,} values, aliases written out")
            return None
        if len(path) > MAX_DEPTH:
            self._fault(node, path[:3], f"nested deeper than {MAX_DEPTH} levels")
            return None
        if id(node) in open_nodes:
            self._fault(node, path, "an alias may not contain itself")
            return None
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
            self._fault(node, path, f"tag {node.tag!r} is not allowed")
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, open_nodes)
        if isinstance(node, yaml.SequenceNode):
            inner = (*open_nodes, id(node))
            items = []
            for index, item in enumerate(node.value):
                at = (*path, str(index))
                self._document.places[at] = self._where(item)
                items.append(self.value(item, at, inner))
            return items
        assert isinstance(node, yaml.ScalarNode)
        return node.value if node.style is not None else _scalar(node.value)

    def mapping(self, node: yaml.MappingNode, path: KeyPath, open_nodes: tuple[int, ...]) -> dict[str, Any]:
        inner = (*open_nodes, id(node))
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(key_node, path, "a key must be a plain word")
                continue
            key = key_node.value
            at = (*path, key)
            if key == "<<":
                self._fault(key_node, at, "merge keys are not supported", "write the values out")
            elif key in values:
                self._fault(key_node, at, f"duplicate key, first given at {self._document.places[at]}")
            else:
                self._document.places[at] = self._where(key_node)
                values[key] = self.value(value_node, at, inner)
        return values

    def _where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"

    def _fault(self, node: yaml.Node, path: KeyPath, message: str, remedy: str = "") -> None:
        self._document.issues.append(Issue(".".join(path), message, self._where(node), remedy))


def _scalar(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("", "~", "null"):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in _SPECIAL:
        return _SPECIAL[lowered]
    if len(text) > MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text
