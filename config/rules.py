"""Rules between keys, declared at the key: `Annotated[float, Field(...), OnlyWith("mode", ("paper",))]`.

Defines the rules; `launch.config.rules` checks a configuration against them. A rule names another key by its full name
(`rollout.engine.backend`), or by its last word if that is a sibling (`mode`). A key is *on* unless it is null, false,
0, empty, `none` or `off`. A rule for more than two keys is a function of `launch.config.check`.

`said` and `remedy` replace the usual message. They may contain {value} (of the key) and {other} (of the key that the
rule names).
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """The key has an effect only where `key` has one of `values`, or is on. A value other than the default elsewhere is
    a fault. `when`: the rule applies only where this key is on."""

    key: str
    values: tuple[Any, ...] = ()
    when: str = ""
    said: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NotWith:
    """The key contradicts `key`, where that has one of `values`, or is on. The value `own` there is a fault; without
    `own`, any value but the default."""

    key: str
    values: tuple[Any, ...] = ()
    own: Any = None
    said: str = ""
    remedy: str = "leave one of them out"


@dataclass(frozen=True, slots=True)
class RequiredWith:
    """The key must not be null where `key` has this value."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Bounded:
    """A number's bound relative to another key, unless either is null. `when`: as in OnlyWith."""

    sign: Literal["<=", "<", ">="]
    key: str
    when: str = ""
    said: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Different:
    """Elements of the list differ in this attribute, their name in metrics. `noun`: what the elements are."""

    name: str
    noun: str


@dataclass(frozen=True, slots=True)
class Shares:
    """Each element of the list is in [0, 1). `when`: as in OnlyWith."""

    when: str = ""


@dataclass(frozen=True, slots=True)
class NamesCode:
    """The text, or each element of the list, has the form package.module:name. `noun`: what the name refers to."""

    noun: str = "name"


Rule = OnlyWith | NotWith | RequiredWith | Bounded | Different | Shares | NamesCode

CUDA = NotWith(  # of a device
    "cluster.layout",
    ("embedded",),
    own="cuda",
    said="cuda, but cluster.layout is embedded (CPU only)",
    remedy="set cluster.layout=colocated",
)
