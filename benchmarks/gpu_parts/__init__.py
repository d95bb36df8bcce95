"""The parts of `benchmarks.gpu`, one module each: `python -m benchmarks.gpu_parts.NAME --out FILE`.

Importing this package lets options classes be made where pydantic is missing (`benchmarks.gpu_parts.bare`), and, where
PACELINE_PRETENDED_CUDA is set, puts the tests' pretended device in CUDA's place: for rehearsals.
"""

import os

from benchmarks.gpu_parts import bare as bare

if os.environ.get("PACELINE_PRETENDED_CUDA"):
    import tests.pretended

    tests.pretended.install()
