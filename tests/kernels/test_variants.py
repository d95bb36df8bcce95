"""The kernels for older CPUs, on this one, and what the variants of one machine have in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from config.formats import FORMATS
from models import ops
from models.low_bit import quantise
from models.ops.native import kernels
from tests.params import long

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]
PROGRAM = "import sys, torch; from tests.kernels.test_variants import compute; torch.save(compute(), sys.argv[1])"
pytestmark = pytest.mark.usefixtures("native")


def compute() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 40, 41], dtype=torch.int32)
    results = {}
    for dtype in DTYPES:
        for rows, depth, columns in ((1, 64, 100), (7, 45, 33), (40, 128, 256)):
            shapes = ((rows, depth), (columns, depth), (columns,))
            x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
            results[f"linear {dtype} {rows}"] = ops.linear(x, weight, bias, invariant=True)
            a, b = torch.randn(3, depth, generator=generator), torch.randn(columns, 3, generator=generator)
            results[f"linear {dtype} {rows} merged"] = ops.adapted_linear(
                x, weight, bias, [ops.LowRank(a, b, 0.5, 0, columns)], invariant=True
            )
        for name in ("w8a8", "w4a8"):
            for rows in (1, 7, 16, 40, 70):  # by tiles from 12 or 24 rows on, where there are any
                low_bit = quantise(torch.randn(100, 384, generator=generator), FORMATS[name])
                x = torch.randn(rows, 384, generator=generator).to(dtype)
                results[f"low-bit {name} {dtype} {rows}"] = ops.low_bit_linear(x, low_bit)
        for heads, width in ((5, 24), (4, 64), (2, 80)):
            q, k, v = (torch.randn(41, h, width, generator=generator).to(dtype) for h in (heads, 1, 1))
            results[f"attention {dtype} {heads}"] = ops.packed_attention(q, k, v, offsets, width**-0.5)
    return results


def _limited(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PACELINE_CPU": level, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(params=["avx2", "avx512"])
def lower(request: pytest.FixtureRequest) -> str:
    """A level below that of this process."""
    levels = ["avx2", "avx512", "amx"]
    mine = kernels.cpu_level()  # type: ignore[union-attr]
    if levels.index(request.param) >= levels.index(mine):
        pytest.skip(f"the kernels of this process are at level {mine}: {request.param} is not below it")
    return str(request.param)


def test_variants_differ_by_rounding_only_and_not_at_all_in_float32_and_low_bit_products(
    lower: str, tmp_path: Path
) -> None:
    result = _limited(lower, "-c", PROGRAM, str(tmp_path / "lower.pt"))
    assert result.returncode == 0, result.stderr
    older, mine = torch.load(tmp_path / "lower.pt"), compute()
    assert older.keys() == mine.keys()
    for name, expected in older.items():
        if name.startswith(("linear torch.float32", "low-bit")):
            assert torch.equal(mine[name], expected), name
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine[name], expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("area", ["test_linear.py", *long("test_attention.py", "test_low_bit.py")])
def test_an_older_variant_passes_the_same_tests(lower: str, area: str) -> None:
    if lower == "avx512" and area == "test_attention.py":
        pytest.skip("attention is the same with AMX")
    result = _limited(lower, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{area}")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_limit_that_names_no_level_is_refused_at_import() -> None:
    result = _limited("avx1024", "-c", "import models.ops")
    assert result.returncode != 0
    assert "PACELINE_CPU=avx1024 names no level of CPU: set it to avx2, avx512 or amx" in result.stderr
