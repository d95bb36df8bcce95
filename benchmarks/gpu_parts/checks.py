"""Run tests/gpu file by file, the kernels first: each against its oracle, then engine, drafter, learner against the
CPU.

It does not use our pytest configuration, whose plugins such a machine may lack, nor unrelated plugins installed there.
A rehearsal only collects: `make test-gpu-pretended` runs the tests without a GPU.
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
    for file in _files():
        log = session.out.parent / f"checks_{file.stem}.log"
        words = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *(["--collect-only"] if session.rehearse else []),
            str(file),
        ]
        done = attempt(words, log, max(5.0, session.left_s))
        counts = {kind: int(count) for count, kind in _COUNTS.findall(done.tail)}
        session.row(file=file.name, exit_code=done.code, seconds=done.seconds, log=log.name, **counts)
        if done.code not in (0, 5):  # 5: no marked tests
            print(done.tail, flush=True)


def _files() -> list[Path]:
    """Return the files, those with the fewest dependencies first: a wrong kernel explains all later failures."""
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    return sorted(files, key=lambda file: file.name != "test_kernels.py")


if __name__ == "__main__":
    part(run, "checks")
