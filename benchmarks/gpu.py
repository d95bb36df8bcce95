"""Everything that wants a GPU, in one command: `python -m benchmarks.gpu --out DIR`. Needs a CUDA device.

For a machine that is lent for minutes: checks first that what it needs is there, then runs each part within its own
time limit, whatever became of the others, and writes log, result and summary.json to DIR. It needs torch, safetensors,
pydantic and pytest; neither Ray nor vLLM, no network and no installed package of ours (without the native extension the
engine uses torch). Owns the list of parts; measures nothing itself.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.harness import ROOT, attempt, command, save

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
    for name, words in commands.items():
        print(f"== {name}: {' '.join(words)}", flush=True)
        done = attempt(words, out / f"{name}.log", limit_s)
        print(done.tail, f"== {name}: {done.text}", sep="\n", flush=True)
        summary[name] = {"outcome": done.code, "seconds": done.seconds}
        save(out / "summary.json", summary)
    return all(part["outcome"] == 0 for part in summary.values())


def main(
    *,
    out: Annotated[Path, "folder for logs and results; is created"],
    sizes: Annotated[Sequence[str], "of benchmarks.graph_pool"] = ("0.5b", "1.5b", "7b"),
    limit_s: Annotated[float, "seconds for each part"] = 180.0,
) -> int:
    if missing := missing_modules():
        sys.exit(f"benchmarks.gpu needs {', '.join(missing)} in {sys.executable}: install, or put wheels on PYTHONPATH")
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu runs what needs a CUDA device, and this machine has none")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs a CUDA device\n", encoding="utf-8")
    return 0 if run_parts(parts(out, sizes), out, limit_s) else 1


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
