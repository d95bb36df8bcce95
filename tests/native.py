"""The marker of tests that need the compiled kernels."""

import pytest

from models.ops.native import kernels

needs_native = pytest.mark.skipif(kernels is None, reason="paceline_native is not installed: pip install -e .")
