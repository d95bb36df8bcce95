"""The configuration tree as a list of keys: type, range, default, description. Reads the models, never a value."""

import difflib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from config.tree import Config

_WORDS: dict[Any, str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the tree. List elements have the name `*`: `reward.terms.*.kind`."""

    name: str
    expected: str  # "an integer, >= 1 or null"
    description: str
    required: bool
    default: Any
    section: type[BaseModel] | None  # the model behind it, for sections and lists of sections
    accepts_text: bool

    @property
    def default_text(self) -> str:
        return "required" if self.required else render(self.default)


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Yield every key below `model`, sections before their members, in the order of the tree."""
    for name, info in model.model_fields.items():
        key = _key(prefix + name, info)
        yield key
        if key.section is not None:
            element = ".*." if _is_list(info.annotation) else "."
            yield from keys(key.section, f"{prefix}{name}{element}")


@functools.cache
def by_name() -> dict[str, Key]:
    return {key.name: key for key in keys()}


def generic(name: str) -> str:
    """Return the name that `by_name` uses: `reward.terms.0.kind` -> `reward.terms.*.kind`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def nearest(name: str) -> str | None:
    """Return the most similar valid key: a sibling with a similar name, the same last word elsewhere, or None."""
    names = [key.name for key in keys()]
    parent, _, last = generic(name).rpartition(".")
    siblings = [n for n in names if n.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(last, [n.rpartition(".")[2] for n in siblings], n=1, cutoff=0.6)
    if close:
        return f"{name.rpartition('.')[0]}.{close[0]}".lstrip(".")
    same = [n for n in names if n.rpartition(".")[2] == last]
    if same:
        return max(same, key=lambda n: difflib.SequenceMatcher(None, generic(name), n).ratio())
    anywhere = difflib.get_close_matches(generic(name), names, n=1, cutoff=0.75)
    return anywhere[0] if anywhere else None


def render(value: Any) -> str:
    """Render a value as YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(render(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {render(v)}" for k, v in value.items()) + "}"
    if isinstance(value, BaseModel):
        return render(value.model_dump(exclude_defaults=True))
    return str(value)


def _key(name: str, info: FieldInfo) -> Key:
    section = _section(info.annotation)
    summary = " ".join((section.__doc__ or "").strip().partition("\n\n")[0].split()) if section else ""
    return Key(
        name=name,
        expected=expected(info.annotation, info.metadata),
        description=info.description or summary,
        required=info.is_required(),
        default=None if info.is_required() else info.get_default(call_default_factory=True),
        section=section,
        accepts_text=str in _members(info.annotation),
    )


def expected(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Describe the allowed values in words: type, choices, range, and whether null is allowed."""
    members = [m for m in _members(annotation) if m is not type(None)]
    text = " or ".join(_one(member) for member in members)
    for item in metadata:
        text = getattr(item, "in_words", text)
        text += "".join(f", {sign} {getattr(item, name)}" for name, sign in _BOUNDS if hasattr(item, name))
        if getattr(item, "min_length", None):
            text += f", at least {item.min_length}"
        if getattr(item, "pattern", None):
            text += f", matching {item.pattern}"
    return f"{text} or null" if type(None) in _members(annotation) else text


def _one(member: Any) -> str:
    if get_origin(member) is Annotated:
        return expected(member.__origin__, [*_constraints(member.__metadata__)])
    if get_origin(member) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(member))
    if get_origin(member) is tuple:
        items = get_args(member)
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        return f"a list of {count}{_plural(_one(items[0]))}"
    if isinstance(member, type) and issubclass(member, BaseModel):
        short = getattr(member, "in_short", None)
        return f"{short}, or a section" if short else "a section"
    return _WORDS.get(member, getattr(member, "__name__", str(member)))


def _plural(text: str) -> str:
    """Turn `an integer, >= 1` into `integers, >= 1`; choices stay as they are."""
    if text.startswith("one of "):
        return text.removeprefix("one of ")
    kind, comma, bounds = text.removeprefix("a ").removeprefix("an ").partition(",")
    return f"{kind}s{comma}{bounds}"


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the constraints of an annotation, including those inside a pydantic Field."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_list(annotation: Any) -> bool:
    return any(get_origin(member) is tuple for member in _members(annotation))


def _section(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        inner = get_args(member)[0] if get_origin(member) is tuple else member
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None
