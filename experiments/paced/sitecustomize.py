"""Engine steps that take at least PACELINE_STEP_S seconds, as a larger model's on a GPU do, and keep no core busy.

For experiments on machines whose cores engines would have to share: a further engine is as fast as the first then.
Python imports this in every process that has the folder on its PYTHONPATH; only engines are touched.
"""

import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_CORE = "actors.engine.batch.engine"
_STEP_S = float(os.environ.get("PACELINE_STEP_S", "0"))


class _Paced(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        step = module.BatchEngine.step

        def paced(core: object) -> object:
            begin_s = time.perf_counter()
            events = step(core)
            time.sleep(max(0.0, _STEP_S - (time.perf_counter() - begin_s)))
            return events

        module.BatchEngine.step = paced


class _Finder(MetaPathFinder):
    """Removes itself once it has found the engine's core, whichever finder knows where that is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CORE:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name, path)
        if found is not None and found.loader is not None:
            found.loader = _Paced(found.loader)
        return found


if _STEP_S:
    sys.meta_path.insert(0, _Finder())
