"""Run everything that needs a GPU, within ten minutes: `python -m benchmarks.gpu --out DIR --budget-s 560`.

For a machine that is lent for minutes. Each part is a process with its own time limit, runs regardless of the others'
outcome, and writes every row at once, with the prediction next to each measurement. After each part DIR has three
files, as a lent machine may return few: results.jsonl (every row, and its part), summary.json (the machine, the outcome
of each part), logs.tgz. The last output is the error of the predictions. It needs torch, triton, transformers, numpy,
safetensors and pytest: neither pydantic, Ray nor vLLM, no network and no installed package of ours. `--rehearse` runs
every part with tiny shapes on any machine, with PACELINE_PRETENDED_CUDA=1 on a pretended device, so that nothing runs
for the first time in borrowed minutes. Owns the list of parts and their limits; measures nothing itself.
"""

import importlib.util
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.harness import attempt, command, machine, markdown, save

REQUIRED = ("torch", "numpy", "safetensors", "pytest")
_RATIO = "_over_predicted"
BUDGET_S = 560.0  # about the sum of the shares below


@dataclass(frozen=True, slots=True)
class Part:
    """One process. Seconds are shares of a budget of BUDGET_S."""

    name: str
    seconds: float
    answers: str
    command: tuple[str, ...] = ()  # default: the module benchmarks.gpu_parts.NAME


PARTS = (
    Part("machine", 15, "versions; which attention torch chooses"),
    Part("ceilings", 20, "the predictor's constants"),
    Part("checks", 90, "tests/gpu and the kernels against their oracles"),
    Part("steps", 105, "the step table, with graphs and without"),
    Part("mixed", 35, "prompt chunks beside decoding, shapes seen first, peak memory"),
    Part("verifying", 60, "verification, EAGLE, the sampler, the best speculation"),
    Part("low_bits", 40, "products and steps with weights in few bits beside bfloat16"),
    Part("self_drafts", 25, "drafts by a copy in few bits: by depth, cycles, gain over plain, equal tokens"),
    Part("captures", 30, "captures, sleep and wake; a whole engine's step"),
    Part("learning", 60, "the learner's tokens per second, MFU, peak memory"),
    Part("handing", 30, "the hand-over of weights"),
    Part("agreement", 50, "equal tokens with speculation; the demo"),
    Part("peer", 20, "vLLM at three points, if it is installed"),
)


def missing_modules(names: Sequence[str] = REQUIRED) -> list[str]:
    """Return the modules that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def command_of(part: Part, out: Path, limit_s: float, rehearse: bool) -> tuple[str, ...]:
    if part.command:
        return part.command
    words = (sys.executable, "-m", f"benchmarks.gpu_parts.{part.name}", "--out", str(out / f"{part.name}.jsonl"))
    return (*words, "--budget-s", f"{0.9 * limit_s:.0f}", *(("--rehearse",) if rehearse else ()))


def run_parts(parts: Sequence[Part], work: Path, out: Path, budget_s: float, *, rehearse: bool = False) -> bool:
    """Run the parts in turn, each for at most 1.5 times its share of the remaining time, so that later parts use what
    one leaves. They write below `work`; after each, `out` has all results. Returns whether all succeeded."""
    summary: dict[str, Any] = {"machine": machine(), "rehearsal": rehearse, "budget_s": budget_s, "parts": {}}
    start_s = time.monotonic()
    for place, part in enumerate(parts):
        left_s = budget_s - (time.monotonic() - start_s)
        shares = sum(later.seconds for later in parts[place:])
        limit_s = min(left_s, max(1.5 * part.seconds * left_s / shares, 10.0))
        if limit_s < 5:
            summary["parts"][part.name] = {"outcome": "no time left"}
            gather(parts, work, out, summary)
            continue
        words = command_of(part, work, limit_s, rehearse)
        print(f"== {part.name}: {part.answers} (at most {limit_s:.0f} s)", flush=True)
        done = attempt(words, work / f"{part.name}.log", limit_s)
        rows = read_rows(work / f"{part.name}.jsonl")
        print(done.tail, f"== {part.name}: {done.text}, {len(rows)} rows", sep="\n", flush=True)
        summary["parts"][part.name] = {"outcome": done.code, "seconds": done.seconds, "rows": len(rows)}
        gather(parts, work, out, summary)
    return all(part["outcome"] == 0 for part in summary["parts"].values())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a part, also of one that ended in the middle of a row."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def beside_predictions(work: Path, parts: Sequence[Part]) -> list[tuple[str, str, int, float, float]]:
    """Return (part, quantity, rows, median and largest of measured / predicted) of all predicted quantities."""
    found = []
    for part in parts:
        ratios: dict[str, list[float]] = {}
        for row in read_rows(work / f"{part.name}.jsonl"):
            for key, value in row.items():
                if key.endswith(_RATIO):
                    ratios.setdefault(key.removesuffix(_RATIO), []).append(value)
        found += [(part.name, key, len(of), median(of), max(of)) for key, of in ratios.items()]
    return found


def gather(parts: Sequence[Part], work: Path, out: Path, summary: Mapping[str, Any]) -> None:
    """Gather everything so far into three files, each replaced atomically, since the machine may be taken away."""
    new = out / ".new"
    save(new, summary)
    new.replace(out / "summary.json")
    with new.open("w", encoding="utf-8") as file:
        for part in parts:
            for row in read_rows(work / f"{part.name}.jsonl"):
                file.write(json.dumps({"part": part.name} | row) + "\n")
    new.replace(out / "results.jsonl")
    with tarfile.open(new, "w:gz") as archive:
        for log in sorted(work.glob("*.log")):
            archive.add(log, log.name)
    new.replace(out / "logs.tgz")


def main(
    *,
    out: Annotated[Path, "folder for the three files; is created"],
    budget_s: Annotated[float, "seconds for all parts together"] = BUDGET_S,
    parts: Annotated[Sequence[str], "only these", tuple(part.name for part in PARTS)] = (),
    rehearse: Annotated[bool, "tiny shapes, on whatever there is"] = False,
) -> int:
    if missing := missing_modules():
        sys.exit(f"benchmarks.gpu needs {', '.join(missing)} in {sys.executable}: install, or put wheels on PYTHONPATH")
    import torch

    if not torch.cuda.is_available() and not rehearse:
        sys.exit("benchmarks.gpu runs what needs a CUDA device, and this machine has none: --rehearse tries it out")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if not parts or part.name in parts]
    with tempfile.TemporaryDirectory() as work:
        complete = run_parts(chosen, Path(work), out, budget_s, rehearse=rehearse)
        beside = beside_predictions(Path(work), chosen)
    rows = [(*names, f"{middle:.2f}", f"{most:.2f}") for *names, middle, most in beside]
    print(markdown("part | quantity | rows | median measured / predicted | largest", rows))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
