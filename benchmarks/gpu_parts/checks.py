"""Everything that is marked gpu in tests/gpu and tests/ops: CUDA against the CPU, kernels against their oracles.

Not our pytest configuration, which names plugins that such a machine need not have; and no plugin that is installed
there and knows nothing of us. A rehearsal only collects: `make test-gpu-pretended` runs them without a GPU.
"""

import os
import re
import sys
from pathlib import Path

from benchmarks.gpu_parts.session import Session, part
from benchmarks.harness import ROOT, attempt

_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors|deselected)")


def run(session: Session) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ini = session.out.parent / "pytest.ini"
    ini.write_text("[pytest]\nmarkers =\n  gpu: needs a CUDA device\n", encoding="utf-8")
    options = ["-q", "-rs", "-c", str(ini), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "gpu"]
    options += ["-p", "benchmarks.gpu_parts.bare"]
    for folder in _folders():
        log = session.out.parent / f"checks_{folder.name}.log"
        words = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *(["--collect-only"] if session.rehearse else []),
            str(folder),
        ]
        done = attempt(words, log, max(5.0, session.left_s))
        counts = {kind: int(count) for count, kind in _COUNTS.findall(done.tail)}
        session.row(folder=folder.name, exit_code=done.code, seconds=done.seconds, log=log.name, **counts)
        if done.code not in (0, 5):  # 5: nothing there is marked
            print(done.tail, flush=True)


def _folders() -> list[Path]:
    return [ROOT / "tests" / name for name in ("gpu", "ops") if (ROOT / "tests" / name).is_dir()]


if __name__ == "__main__":
    part(run, "checks")
