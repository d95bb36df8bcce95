"""Import paths `package.module:function` in a configuration: their form, the import, and its errors.

Standard library only. The caller (learner, driver, engine) checks the imported object.
"""

import importlib
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
FORM_TEXT = "package.module:function"


class OwnCodeError(ValueError):
    """An unusable function or class named by the configuration; the message has the key and the path."""


def is_path(text: str) -> bool:
    """Return whether the text has the form package.module:function."""
    return _FORM.fullmatch(text) is not None


def imported(path: str, key: str) -> Callable[..., Any]:
    """Return the function or class at `path`, the value of `key`. Raises OwnCodeError."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module can raise anything
        raise OwnCodeError(f"{key}: {path} cannot be imported: {described(error)}") from error
    if (found := getattr(module, name, None)) is None:
        raise OwnCodeError(f"{key}: {module.__name__} ({module.__file__}) has no {name!r}")
    if not callable(found):
        raise OwnCodeError(f"{key}: {path} is not callable, it is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def described(error: BaseException) -> str:
    """Return `ValueError: the text (file.py:12)`, located at the innermost frame outside Python and installed
    packages."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/lib/python" not in frame.filename and not frame.filename.startswith("<") and frame.filename != __file__
    ]
    place = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@dataclass(frozen=True, slots=True)
class ImportPath:
    """Annotation of a key whose value is such a path or one of `names`."""

    names: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """Text for messages: which values are accepted."""
        return f"one of {', '.join(self.names)}, or {FORM_TEXT}" if self.names else FORM_TEXT

    def __call__(self, value: str | None) -> str | None:
        """Validate the value. Raises ValueError."""
        if value is None or value in self.names or is_path(value):
            return value
        raise ValueError(f"expected {self.in_words}; got {value!r}")
