"""Tests of this folder run the kernels in Triton's interpreter, made faithful by the first import. Where there is a GPU
they are left out: the interpreter rules a whole process, and tests/gpu/test_kernels.py runs the kernels themselves."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":  # tests/conftest.py
    import tests.ops.triton.interpreter  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
