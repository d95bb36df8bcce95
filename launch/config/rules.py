"""Check a configuration against the rules that its keys declare (config.rules). Owns their default messages."""

import re
from collections.abc import Iterator
from typing import Any, assert_never

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from config.rules import Bounded, Different, NamesCode, NotWith, OnlyWith, RequiredWith, Rule, Shares
from config.tree import Config
from launch.config.issues import Issue
from launch.config.schema import render

_PLACE = re.compile(r"[\w.]+:\w+")
_OFF: tuple[Any, ...] = (None, False, 0, "", "none", "off", (), {})
_WORSE = {"<=": "is more than", "<": "is not below", ">=": "is less than"}
_BETTER = {
    "<=": "lower it, or raise the other",
    "<": "lower it, or raise the other",
    ">=": "raise it, or lower the other",
}


def rule_issues(config: Config) -> Iterator[Issue]:
    """Yield one fault for each broken rule, in the order of the tree. Pure."""
    yield from _below(config, config, "")


def _below(config: Config, section: BaseModel, prefix: str) -> Iterator[Issue]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        for rule in info.metadata:
            if isinstance(rule, Rule):
                yield from _Held(config, section, prefix, name, info).against(rule)
        if isinstance(value, BaseModel):
            yield from _below(config, value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for index, element in enumerate(value):
                if isinstance(element, BaseModel):
                    yield from _below(config, element, f"{prefix}{name}.{index}.")


class _Held:
    """One key and its value, as its rules see them."""

    def __init__(self, config: Config, section: BaseModel, prefix: str, name: str, info: FieldInfo) -> None:
        self._config, self._section, self._prefix = config, section, prefix
        self._key, self._value = f"{prefix}{name}", getattr(section, name)
        self._default = info.get_default(call_default_factory=True)

    def against(self, rule: Rule) -> Iterator[Issue]:
        match rule:
            case OnlyWith():
                yield from self._only_with(rule)
            case NotWith():
                yield from self._not_with(rule)
            case RequiredWith():
                if self._value is None and self._other(rule.key) == rule.value:
                    yield Issue(self._key, f"required for {rule.key} {rule.value}")
            case Bounded():
                yield from self._bounded(rule)
            case Different():
                yield from self._different(rule)
            case Shares():
                if self._counts(rule.when) and not all(0 <= share < 1 for share in self._value):
                    yield Issue(self._key, f"each must be in [0, 1), got {list(self._value)}")
            case NamesCode():
                yield from self._import_path(rule)
            case _:
                assert_never(rule)

    def _only_with(self, rule: OnlyWith) -> Iterator[Issue]:
        other = self._other(rule.key)
        useful = other in rule.values if rule.values else _on(other)
        if useful or self._value == self._default or not self._counts(rule.when):
            return
        if rule.values:
            usual = f"only {rule.key} {' or '.join(map(render, rule.values))} uses it, this is {render(other)}"
            remedy = f"leave it out, or set {self._whole(rule.key)}={render(rule.values[0])}"
        else:
            usual = f"is set, but {self._whole(rule.key)} is {'not' if other is None else render(other)}"
            remedy = f"leave it out, or set {self._whole(rule.key)}"
        yield self._issue(rule.said or usual, rule.remedy or remedy, other)

    def _not_with(self, rule: NotWith) -> Iterator[Issue]:
        other = self._other(rule.key)
        meets = other in rule.values if rule.values else _on(other)
        given = self._value != self._default if rule.own is None else self._value == rule.own
        if meets and given:
            yield self._issue(rule.said or f"is set, and so is {self._whole(rule.key)}", rule.remedy, other)

    def _bounded(self, rule: Bounded) -> Iterator[Issue]:
        value, other = self._value, self._other(rule.key)
        if value is None or other is None or not self._counts(rule.when):
            return
        held = {"<=": value <= other, "<": value < other, ">=": value >= other}[rule.sign]
        if not held:
            usual = f"{value:g} {_WORSE[rule.sign]} {self._whole(rule.key)} = {other:g}"
            yield self._issue(rule.said or usual, rule.remedy or _BETTER[rule.sign], other)

    def _different(self, rule: Different) -> Iterator[Issue]:
        names = [getattr(element, rule.name) for element in self._value]
        for index, name in enumerate(names):
            if name in names[:index]:
                said = f"two {rule.noun} are called {name!r}: metrics need different names"
                yield Issue(f"{self._key}.{index}.name", said, remedy=f"set {self._key}.{index}.name")

    def _import_path(self, rule: NamesCode) -> Iterator[Issue]:
        each = isinstance(self._value, tuple)
        places = (
            [(f"{self._key}.{i}", one) for i, one in enumerate(self._value)] if each else [(self._key, self._value)]
        )
        for key, place in places:
            if place is not None and not _PLACE.fullmatch(place):
                yield Issue(key, f"{place!r} is not of the form package.module:{rule.noun}")

    def _issue(self, said: str, remedy: str, other: Any) -> Issue:
        texts = {"value": render(self._value), "other": render(other)}
        return Issue(self._key, _filled(said, texts), remedy=_filled(remedy, texts))

    def _other(self, key: str) -> Any:
        """Return the value of a sibling, or of a whole key; None below an absent section."""
        if self._is_sibling(key):
            return getattr(self._section, key)
        value: Any = self._config
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        return value

    def _counts(self, when: str) -> bool:
        return not when or _on(self._other(when))

    def _whole(self, key: str) -> str:
        return f"{self._prefix}{key}" if self._is_sibling(key) else key

    def _is_sibling(self, key: str) -> bool:
        section = type(self._section)
        return key in section.model_fields or isinstance(getattr(section, key, None), property)


def _on(value: Any) -> bool:
    return not any(value == off and type(value) is type(off) for off in _OFF)


def _filled(text: str, texts: dict[str, str]) -> str:
    for name, value in texts.items():
        text = text.replace("{" + name + "}", value)
    return text
