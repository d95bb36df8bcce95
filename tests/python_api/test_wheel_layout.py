"""In a wheel all packages are below paceline/: no module of it imports, or is imported as, a name at the top."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import OUR_PACKAGES
from native.wheel_layout import PACKAGES, lay_out, rewritten

ROOT = Path(__file__).parents[2]
# As in an environment without this checkout, whose editable installation finds our packages before any path does.
AWAY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""
# Everything is imported but what needs a GPU's compiler or vLLM, and what is run by its path.
PROGRAM = """
import importlib, pkgutil, sys
import paceline
assert paceline.__file__.startswith(sys.argv[1]), paceline.__file__
def fail(name):
    raise
for found in pkgutil.walk_packages(paceline.__path__, "paceline.", fail):
    if not any(part in found.name for part in (".vllm", ".triton.", ".confinement.", "__main__", "admin_pb2")):
        importlib.import_module(found.name)
at_top = sorted(name for name in sys.modules if name.partition(".")[0] in %r)
assert not at_top, at_top
from paceline.launch.errors import as_expected
class Mine(Exception): pass
Mine.__module__ = "models.mine"  # a user's, whose failure is no message of ours
assert as_expected(Mine("x")) is None and as_expected(paceline.ConfigError([])) is not None
print("DONE", len(sys.modules))
"""


def test_imports_are_rewritten_and_nothing_else() -> None:
    source = (
        '"""from actors.x import y"""\nfrom actors.x import (\n    y,\n)\nfrom . import models\nimport torch, os\n'
        "if True:\n    from models import z; from launch.config import Config\nimport policies.a as a\n"
        'text = "é"; from drafter.build import build\nfrom modelsmith import w\n'
    )
    assert rewritten(source, "m.py") == (
        '"""from actors.x import y"""\nfrom paceline.actors.x import (\n    y,\n)\nfrom . import models\n'
        "import torch, os\n"
        "if True:\n    from paceline.models import z; from paceline.launch.config import Config\n"
        "import paceline.policies.a as a\n"
        'text = "é"; from paceline.drafter.build import build\nfrom modelsmith import w\n'
    )
    for plain in ("import actors.engine", "import os, models"):
        with pytest.raises(ValueError, match=r"m\.py, line 1: write"):
            rewritten(plain, "m.py")
    assert set(PACKAGES) == OUR_PACKAGES


@pytest.mark.slow
def test_a_users_models_and_actors_are_left_alone(tmp_path: Path) -> None:
    """The whole program is imported, and its command runs, where `models` and `actors` are the user's and hostile."""
    site, here = tmp_path / "site", tmp_path / "here"
    lay_out(ROOT, site)
    (here / "actors").mkdir(parents=True)
    for path in (here / "actors" / "__init__.py", here / "models.py", here / "launch.py"):
        path.write_text("raise SystemExit('a user\\'s module was imported')")

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{here}:{site}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment, timeout=250)

    done = python("-c", AWAY + PROGRAM % (PACKAGES,), str(site))
    assert "DONE" in done.stdout, done.stdout + done.stderr
    (here / "c.yaml").write_text("run: {name: x}\nmodel: {path: m}\ndata: {train: t}\n")
    done = python("-c", f"{AWAY}\nimport runpy; runpy.run_module('paceline', run_name='__main__')", "config", "c.yaml")
    assert (done.returncode, "name: x" in done.stdout, "error: model.path" in done.stderr) == (2, True, True), done
    done = python(
        "-c", f"{AWAY}\nimport runpy; runpy.run_module('paceline', run_name='__main__')", "config", "c.yaml", "lr=1"
    )
    assert "use learner.optimizer.lr=1" in done.stderr or "did you mean learner.optimizer.lr=1" in done.stderr
