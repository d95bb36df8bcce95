"""The interpreter's dot product: its sums have one order, on every CPU and in every batch."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.harness import ROOT
from models.ops.triton import launch
from tests.ops.triton.interpreter import product
from tests.params import long

FEATURES = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
# OpenBLAS's kernels for these CPUs; a name that it does not know changes nothing (macOS, aarch64).
CORE_TYPES = ["Haswell", "Zen", *(["SkylakeX"] if FEATURES.get("AVX512F") else [])]


def rows_of_products() -> str:
    """Assert that rows have the same bits alone as in a batch; digest of all bits."""
    draw, digest = torch.Generator().manual_seed(0), hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight = (torch.randn(n, 200, generator=draw).to(dtype) for n in (70, 40))
        together = launch.linear(x, weight, None, True)
        for part in (slice(0, 1), slice(64, 65), slice(3, 20)):
            assert torch.equal(launch.linear(x[part], weight, None, True), together[part]), (dtype, part)
        digest.update(together.numpy().tobytes())
    left, right = (torch.randn(shape, generator=draw).numpy() for shape in ((3, 33, 70), (3, 70, 17)))
    together = product(left, right, np.float32)
    for batch in range(3):
        for rows in (slice(0, 1), slice(5, 6), slice(4, 21)):
            alone = product(left[batch, rows], right[batch], np.float32)
            assert np.array_equal(alone, together[batch, rows]), (batch, rows)
    digest.update(together.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("core_type", [CORE_TYPES[0], *long(*CORE_TYPES[1:])])
def test_a_row_has_the_same_bits_in_any_batch_under_each_kernel_of_openblas(core_type: str) -> None:
    """numpy's matmul fails it under Haswell and Zen. The bits are also those of this process."""
    code = f"from {__name__} import rows_of_products; print(rows_of_products())"
    command = [sys.executable, "-c", f"import tests.ops.triton.interpreter; {code}"]
    environment = {**os.environ, "OPENBLAS_CORETYPE": core_type}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [rows_of_products()]


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_a_product_sums_in_the_order_of_depth(batch: tuple[int, ...]) -> None:
    """Element by element, each product and each sum rounded to float32."""
    draw = np.random.default_rng(0)
    left, right = (draw.standard_normal((*batch, *shape)).astype(np.float32) for shape in ((5, 37), (37, 3)))
    found = product(left, np.asfortranarray(right), np.float32)
    for place in np.ndindex(*batch, 5, 3):
        total = np.float32(0)
        for x, y in zip(left[place[:-1]], right[(*place[:-2], slice(None), place[-1])], strict=True):
            total += x * y
        assert found[place] == total, place


def test_a_product_of_halves_sums_in_the_accumulators_type() -> None:
    """1 + 512 * 2^-12 = 1.125; in float16, whose steps at 1 are 2^-10, it would stay 1."""
    left = np.array([[1.0, *[2.0**-6] * 512]], np.float16)
    right = np.array([[1.0], *[[2.0**-6]] * 512], np.float16)
    assert product(left, right, np.float32).tolist() == [[1.125]]
