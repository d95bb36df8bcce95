"""The markers of tests that need the compiled kernels."""

import pytest

from models.ops.native import kernels

needs_native = pytest.mark.skipif(kernels is None, reason="paceline_native is not installed: pip install -e .")
needs_suffixes = pytest.mark.skipif(
    not hasattr(kernels, "Suffixes"), reason="paceline_native is missing or old: pip install -e ."
)
