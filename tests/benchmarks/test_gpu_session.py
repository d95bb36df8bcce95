"""`benchmarks.gpu`: every part runs whatever became of the others, and says so; nothing runs without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import missing_modules, parts, run_parts
from benchmarks.harness import ROOT


def test_parts_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    commands = {
        "hangs": [*python, "import time; print('started', flush=True); time.sleep(60)"],
        "fails": [*python, "import sys; print('why'); sys.exit(3)"],
        "works": [*python, "print('done')"],
    }
    assert not run_parts(commands, tmp_path, limit_s=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [part["outcome"] for part in summary.values()] == [None, 3, 0]
    assert (tmp_path / "hangs.log").read_text() == "started\n"
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert run_parts({"works": commands["works"]}, tmp_path, limit_s=30)


def test_the_parts_name_what_exists(tmp_path: Path) -> None:
    commands = parts(tmp_path, ["0.5b"])
    assert Path(commands["tests"][-1]).is_dir()
    module = commands["graph_pool_0.5b"]
    assert (ROOT / f"{module[module.index('-m') + 1].replace('.', '/')}.py").is_file()


def test_missing_modules_are_named() -> None:
    assert missing_modules(("json", "no_such_module_here")) == ["no_such_module_here"]


@pytest.mark.parametrize("module", ["benchmarks.gpu", "benchmarks.graph_pool"])
def test_without_cuda_it_says_so(tmp_path: Path, module: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    command = [sys.executable, "-m", module, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
