"""The kernels as machine code, compiled without a GPU in a process of its own (the interpreter rules this one)."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RESULTS, ROOT
from config.formats import FORMATS

KERNELS_WITH_WIDE_LOADS = (
    *FORMATS,
    "quantise",
    "rms_norm",
    "rope_write",
    "swiglu",
    "attention",
    "linear",
    "chunks",
    "cutoff",
)
INSTRUCTION = re.compile(r"warpsPerCTA = \[[^]]*\], ")  # of a product all but which warp has which part
NORMS_AND_GATES = ("add_norm_quantise", "swiglu_quantise")
LAUNCHED_APART = ("sample", "top ", "cutoff", "draft inputs", "tree")
ATTENTION_REGISTERS = {"whole": 192, "split": 168, "items": 168, "merge": 168}


def compiled(tmp_path: Path, sizes: list[str], architectures: list[str]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = tmp_path / "kernels.json"
    arguments = ["--sizes", *sizes, "--architectures", *architectures, "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.triton_kernels", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def assert_fit_for_use(rows: list[dict[str, Any]]) -> None:
    assert rows
    for row in rows:
        name = row["kernel"]
        assert row["spills"] == row["stack_bytes"] == 0, row
        if any(part in name for part in KERNELS_WITH_WIDE_LOADS):
            assert row["loads_128_bit"] > 0, row
        if name.startswith("attention"):
            kind = name.split()[1].rstrip(",")
            assert row["registers"] <= ATTENTION_REGISTERS[kind], row
            assert kind == "merge" or row["tensor_core"] > 0, row
            # With one buffer every 32 keys wait for memory: the next are asked for when these are done with.
            assert kind == "merge" or row["buffers"] >= 2, row
        if name.startswith(("linear", *FORMATS)):
            assert row["tensor_core"] > 0, row
            assert row["buffers"] >= 2, row
        if name.startswith(("w4a16, 8 ", "w4a8, 8 ")):
            assert 0 < row["per_weight"] <= (4.0 if row["architecture"] == "sm_90" else 6.0), row
        if "float32" in row:  # each operation rounded by itself, or integer formats would lose their bits
            # Norms and SwiGLU divide as their own kernels do.
            own = {"div.full.f32", "sub.rn.f32"} if name.startswith(NORMS_AND_GATES) else set()
            assert set(row["float32"].split(", ")) <= {"add.rn.f32", "mul.rn.f32", "div.rn.f32"} | own, row
        early = row["architecture"] == "sm_90" and not name.startswith(LAUNCHED_APART)
        assert (row["before_wait"] is not None) is early, row
        # Before a kernel knows that the one before it has ended, it asks for weights, and does nothing else.
        assert row["before_wait"] in (None, "", "CCTL.E.PF2, prefetch.global.L2"), row
        assert not row["before_wait"] or name.startswith(tuple(FORMATS)), row
    assert any("float32" in row for row in rows)
    for model in {row["model"] for row in rows}:
        for architecture in {row["architecture"] for row in rows}:
            mine = [row for row in rows if (row["model"], row["architecture"]) == (model, architecture)]
            shapes = {row["products"] for row in mine if row["kernel"].startswith("attention") and row["products"]}
            assert len(shapes) == 1, "ways of one attention multiply alike, or their bits would differ"
            sums = {row["sums"] for row in mine if row["kernel"].startswith(("rms_norm", "add_rms_norm", "add_norm_q"))}
            assert len(sums) == 1, "norms add squares in one order, or their bits would differ"
            assert "" not in sums
            instructions = {INSTRUCTION.sub("", row["products"]) for row in mine if row["kernel"].startswith("w4a16")}
            assert len(instructions) == 1, "few rows and many multiply alike, or their bits would differ"


@pytest.mark.long
def test_an_h100_runs_the_7b_model_without_spills_by_wide_loads(tmp_path: Path) -> None:
    assert_fit_for_use(compiled(tmp_path, ["7b"], ["90"]))


@pytest.mark.pretended
def test_the_committed_record_is_what_the_compiler_makes(tmp_path: Path) -> None:
    """To the register, where the compiler is the record's; fit for use by any."""
    rows = compiled(tmp_path, ["0.5b", "1.5b", "7b"], ["80", "90"])
    assert_fit_for_use(rows)
    record = json.loads((RESULTS / "triton_kernels.json").read_text())
    assert rows == record["rows"] or record["settings"]["triton"] != version("triton")


def test_the_committed_record_is_of_fit_kernels() -> None:
    assert_fit_for_use(json.loads((RESULTS / "triton_kernels.json").read_text())["rows"])
