"""Tests of this folder run the kernels in Triton's interpreter, made faithful by the first import."""

import tests.ops.triton.interpreter  # noqa: F401
