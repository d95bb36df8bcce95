"""A stand-in for the parts of pydantic that options classes use, to import our modules on a machine without it.

Only for `benchmarks.gpu`, whose parts give options that are right by construction: nothing is validated. It is used
only where pydantic is missing, and never when Paceline itself runs. As a pytest plugin (`-p benchmarks.gpu_parts.bare`)
it does the same for tests.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar


class _Field:
    """A field in `model_fields`."""

    def __init__(self, default: Any) -> None:
        self.default = default


class _Options:
    """Frozen attributes with defaults, by keyword."""

    model_fields: ClassVar[dict[str, _Field]] = {}

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()
        fields = dict(cls.model_fields)
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name, ...)
            fields[name] = _Field(default)
        cls.model_fields = fields

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - self.model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name, field in self.model_fields.items():
            value = given.get(name, field.default)
            if value is ...:
                raise TypeError(f"{type(self).__name__} needs {name}")
            self.__dict__[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Any:
        return type(self)(**{**self.__dict__, **(update or {})})

    def model_dump(self) -> dict[str, Any]:
        return {k: v.model_dump() if isinstance(v, _Options) else v for k, v in self.__dict__.items()}


def _no_field(default: Any = ..., **_: Any) -> Any:
    """Return a field's default. In Annotated the result is unused; as a default, `...` means that there is none."""
    return default


def _left_as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def stand_in() -> Any:
    """Return the stand-in module."""
    module: Any = ModuleType("pydantic")
    module.BaseModel, module.Field, module.ValidationError = _Options, _no_field, ValueError
    module.AfterValidator = _left_as_it_is
    for name in ("field_validator", "model_validator", "field_serializer", "model_serializer"):
        setattr(module, name, _left_as_it_is)
    return module


def allow_bare() -> bool:
    """Install the stand-in if there is no pydantic. Returns whether it is in place."""
    if "pydantic" not in sys.modules and importlib.util.find_spec("pydantic") is None:
        sys.modules["pydantic"] = stand_in()
    return getattr(sys.modules.get("pydantic"), "BaseModel", None) is _Options


BARE = allow_bare()
