"""Pass reward functions given as Python objects to workers, which load them by module and name only.

A function of an importable module is passed by its name. A function of a script, a notebook or another function is
pickled by value (cloudpickle, which comes with Ray) into a module in run.dir, which all nodes see. `code_paths` puts
its folder on this process's `sys.path`, and launch.cluster.session on that of the workers.
"""

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.config import Config
from launch.errors import UsageError
from launch.observe.journal import replace

MODULE = "paceline_reward_functions"
FOLDER = "reward_functions"  # in run.dir
_HEAD = '''"""Reward functions of a run, as paceline.train was given them. Written by it, read by reward workers."""

import base64
import pickle
'''


def code_paths(config: Config) -> list[str]:
    """Return the folders that workers need on `sys.path` for the functions of `config`. Also adds them to this
    process's."""
    if not any((term.function or "").startswith(f"{MODULE}:") for term in config.reward.terms):
        return []
    folder = _folder(config)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry).parent != folder.parent)]
    return [str(folder)]


def _folder(config: Config) -> Path:
    return Path(config.run.dir) / FOLDER / config.run.name


def reward_override(terms: Sequence[Callable[..., Any] | Mapping[str, Any]], config: Config) -> str:
    """Return `reward.terms=...` for functions and terms. Writes a module for those that cannot be imported by name.
    Raises UsageError."""
    pickled: dict[str, Callable[..., Any]] = {}
    written: list[dict[str, Any]] = []
    for term in terms:
        values: dict[str, Any] = dict(term) if isinstance(term, Mapping) else {"function": term}
        function = values.get("function")
        if callable(function):
            name = getattr(function, "__name__", type(function).__name__)
            name = name if name.isidentifier() else f"function_{len(written)}"
            values = {"kind": "python", "name": name, **values, "function": importable(function)}
            if values["function"] is None:
                values["function"] = f"{MODULE}:{name}"
                if pickled.setdefault(name, function) is not function:
                    raise UsageError(f"two reward functions are called {name}", remedy="rename one of them")
        written.append(values)
    if pickled:
        _write(pickled, _folder(config))
    return f"reward.terms={json.dumps(written)}"


def importable(function: Callable[..., Any]) -> str | None:
    """Return `module:name` under which another process finds the same object; None if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == "__main__" or not name.isidentifier():
        return None
    known = sys.modules.get(module)
    if getattr(known, "__file__", None) is None or getattr(known, name, None) is not function:
        return None
    return f"{module}:{name}"


def _write(functions: Mapping[str, Callable[..., Any]], folder: Path) -> None:
    import ray
    from ray import cloudpickle

    if ray.is_initialized():
        raise UsageError(
            f"Ray runs in this process already, and its workers would not find {', '.join(functions)}",
            remedy="call ray.shutdown() first, or put the functions into a module that can be imported",
        )
    lines = [_HEAD]
    for name, function in functions.items():
        try:
            data = base64.b64encode(cloudpickle.dumps(function)).decode("ascii")  # type: ignore[no-untyped-call]
        except Exception as error:  # anything in a closure may refuse to be pickled
            raise UsageError(
                f"the reward function {name} cannot be sent to workers: {type(error).__name__}: {error}",
                remedy="let it open files and connections when it is called, or put it into a module",
            ) from error
        lines.append(f'{name} = pickle.loads(base64.b64decode("{data}"))')
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / f"{MODULE}.py", "\n".join(lines) + "\n")
