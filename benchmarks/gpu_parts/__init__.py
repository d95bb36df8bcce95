"""The parts of `benchmarks.gpu`, one module each: `python -m benchmarks.gpu_parts.NAME --out FILE`.

Importing this package lets options classes be made without pydantic (`benchmarks.gpu_parts.bare`). If
PACELINE_PRETENDED_CUDA is set, it replaces CUDA by the tests' pretended device, for rehearsals.
"""

import os

from benchmarks.gpu_parts import bare as bare

if os.environ.get("PACELINE_PRETENDED_CUDA"):
    import tests.pretended

    tests.pretended.install()
