"""`benchmarks.gpu`: every part runs whatever became of the others, and needs no package that the machine lacks."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import PARTS, Part, command_of, missing_modules, read_rows, run_parts
from benchmarks.gpu_parts.bare import stand_in
from benchmarks.harness import ROOT

HIDDEN = """
import importlib.abc, importlib.util, sys
HIDDEN = {"pydantic", "pydantic_core", "annotated_types", "ray", "vllm", "msgspec", "zmq", "grpc", "pyarrow", "psutil",
          "math_verify", "hypothesis", "datasets", "tensorboard", "scipy", "matplotlib", "paceline_native"}
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)
sys.meta_path.insert(0, Hide())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in HIDDEN - {*sys.modules} else found(name, package)
"""
MEASURED = [part.name for part in PARTS if part.name not in ("machine", "checks", "peer")]


def test_parts_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path) -> None:
    python = (sys.executable, "-c")
    parts = (
        Part("hangs", 1, "", (*python, "import time; print('started', flush=True); time.sleep(60)")),
        Part("fails", 1, "", (*python, "import sys; print('why'); sys.exit(3)")),
        Part("works", 28, "", (*python, "print('done')")),
    )
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    assert not run_parts(parts, work, out, 36)
    summary = json.loads((out / "summary.json").read_text())
    assert [part["outcome"] for part in summary["parts"].values()] == [None, 3, 0]
    assert (work / "hangs.log").read_text() == "started\n"
    with tarfile.open(out / "logs.tgz") as archive:
        assert sorted(archive.getnames()) == ["fails.log", "hangs.log", "works.log"]
        assert archive.extractfile("fails.log").read() == b"why\n"  # type: ignore[union-attr]
    assert sorted(path.name for path in out.iterdir()) == ["logs.tgz", "results.jsonl", "summary.json"]
    assert run_parts(parts[2:], work, out, 30)


def test_without_time_left_a_part_is_named_and_not_begun(tmp_path: Path) -> None:
    parts = (Part("late", 10, "", (sys.executable, "-c", "print('begun')")),)
    assert not run_parts(parts, tmp_path, tmp_path, 4)
    assert json.loads((tmp_path / "summary.json").read_text())["parts"]["late"] == {"outcome": "no time left"}
    assert not (tmp_path / "late.log").exists()


def test_rows_of_a_part_that_was_ended_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"b": 2}\n{"c": ')
    assert read_rows(tmp_path / "rows.jsonl") == [{"a": 1}, {"b": 2}]
    assert read_rows(tmp_path / "nothing.jsonl") == []


def test_the_parts_name_what_exists_and_fill_the_budget(tmp_path: Path) -> None:
    for part in PARTS:
        words = command_of(part, tmp_path, 60, rehearse=False)
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    assert sum(part.seconds for part in PARTS) <= 580


def test_missing_modules_are_named() -> None:
    assert missing_modules(("json", "no_such_module_here")) == ["no_such_module_here"]


def test_the_stand_in_for_pydantic_does_what_options_need() -> None:
    base = stand_in().BaseModel

    class Inner(base):  # type: ignore[valid-type]
        size: int = 3

    class Options(base):  # type: ignore[valid-type]
        name: str
        inner: Inner = Inner()

    options = Options(name="x")
    assert (options.name, options.inner.size) == ("x", 3)
    assert options == Options(name="x", inner=Inner(size=3))
    assert options.model_copy(update={"name": "y"}).name == "y"
    assert Options.model_fields["inner"].default == Inner()
    with pytest.raises(TypeError, match="needs name"):
        Options()
    with pytest.raises(TypeError, match="has no nome"):
        Options(name="x", nome="y")
    with pytest.raises(AttributeError, match="frozen"):
        options.name = "z"


def rehearse(tmp_path: Path, **environment: str) -> dict[str, list[dict[str, Any]]]:
    """Every part with tiny shapes, where only what such a machine has can be imported; rows by part."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--rehearse", "--budget-s", "460"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": str(tmp_path)} | environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = json.loads((out / "summary.json").read_text())
    assert {name: part["outcome"] for name, part in summary["parts"].items()} == {part.name: 0 for part in PARTS}
    assert summary["rehearsal"] is True
    assert summary["machine"]["cores"] > 0
    assert "| steps | graph_ms | 2 |" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["logs.tgz", "results.jsonl", "summary.json"]
    rows: dict[str, list[dict[str, Any]]] = {part.name: [] for part in PARTS}
    for row in read_rows(out / "results.jsonl"):
        rows[row.pop("part")].append(row)
    return rows


def check(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Every part measured something, with what was predicted beside it, and ended by itself."""
    for name, found in rows.items():
        assert found[-1]["done"] is True, name
    for name in MEASURED:
        beside = [key for row in rows[name] for key in row if f"predicted_{key}" in row]
        assert beside or name == "agreement", name
    assert all(row["equal"] == row["responses"] for row in rows["agreement"] if "equal" in row)
    assert any("skipped: it needs pydantic" in str(row.get("demo")) for row in rows["agreement"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device, or pretends to")
def test_every_part_runs_here_without_pydantic_ray_or_the_native_extension(tmp_path: Path) -> None:
    check(rehearse(tmp_path))


@pytest.mark.pretended
def test_every_part_runs_on_the_pretended_device_with_graphs(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, PACELINE_PRETENDED_CUDA="1")
    check(rows)
    assert all(row["captured"] for row in rows["steps"] if "captured" in row)
    assert rows["handing"][1]["peak_gib"] > 0


def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
