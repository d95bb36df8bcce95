"""Everything that wants a GPU, in one command: `python -m benchmarks.gpu --out DIR`. Needs a CUDA device.

For a machine that is lent for minutes: checks first that what it needs is there, then runs each part within its own
time limit, whatever became of the others, and writes log, result and summary.json to DIR. It needs torch, safetensors,
pydantic and pytest; neither Ray nor vLLM, no network and no installed package of ours (without the native extension the
engine uses torch). Owns the list of parts; measures nothing itself.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRED = ("torch", "numpy", "safetensors", "pydantic", "pytest", "hypothesis")


def missing_modules(names: Sequence[str] = REQUIRED) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def parts(out: Path, sizes: Sequence[str]) -> dict[str, list[str]]:
    """Commands by name, the quickest to fail first."""
    python = sys.executable
    # Not our pytest configuration: it names plugins that such a machine need not have.
    tests = [python, "-m", "pytest", "-q", "-rs", "-c", str(out / "pytest.ini"), "--rootdir", str(ROOT)]
    parts = {"tests": [*tests, "-p", "no:cacheprovider", "-m", "gpu", str(ROOT / "tests" / "gpu")]}
    for size in sizes:
        result = out / f"graph_pool_{size}.json"
        parts[f"graph_pool_{size}"] = [
            *(python, "-m", "benchmarks.graph_pool", "--sizes", size, "--out", str(result)),
        ]
    return parts


def run_parts(commands: Mapping[str, Sequence[str]], out: Path, limit_s: float) -> bool:
    """Run them in turn, each for at most limit_s; logs and summary.json in `out`. Whether all of them succeeded."""
    summary: dict[str, dict[str, object]] = {}
    for name, command in commands.items():
        print(f"== {name}: {' '.join(command)}", flush=True)
        start_s = time.monotonic()
        log = out / f"{name}.log"
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
                )
                outcome: object = done.returncode
            except subprocess.TimeoutExpired:
                outcome = f"stopped after {limit_s:g} s"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        print(*tail, sep="\n", flush=True)
        summary[name] = {"outcome": outcome, "seconds": round(time.monotonic() - start_s, 1)}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1), flush=True)
    return all(part["outcome"] == 0 for part in summary.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results; is created")
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "7b"], help="of benchmarks.graph_pool")
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds for each part")
    options = parser.parse_args()
    if missing := missing_modules():
        sys.exit(f"benchmarks.gpu needs {', '.join(missing)} in {sys.executable}: install, or put wheels on PYTHONPATH")
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu runs what needs a CUDA device, and this machine has none")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs a CUDA device\n", encoding="utf-8")
    out = options.out.resolve()
    sys.exit(0 if run_parts(parts(out, options.sizes), out, options.limit_s) else 1)


if __name__ == "__main__":
    main()
