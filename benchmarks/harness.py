"""Shared code of benchmarks and experiments: options, machine facts, a busy guard, turns, intervals, the record.

Owns how a script's `main` becomes a command, how contestants take turns within one process, the interval of paired
values, and the machine facts in a record. Never decides what is measured. Needs no package but numpy, so that it runs
on a bare GPU machine. Figures: benchmarks/figures.py.
"""

import argparse
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DEMO = ROOT / "examples/guess_and_check"
PACKAGES = ("torch", "ray", "transformers", "numpy")
BUSY_CORES = 0.5
DRAWS = 2000  # of a bootstrap
T = TypeVar("T")

# Options.


def command(make: Callable[..., T], *, timed: bool = True) -> T:
    """Call `make`, a function or a dataclass, with this process's command line. Returns its result.

    A keyword of its signature is an option of that name: of several values if it is a sequence, a flag if it is a bool.
    `Annotated[T, help, choices]` adds to it. A parameter without a default is positional (or an option, after `*`), and
    `*name` takes the rest. If `timed`, a busy machine is refused unless --busy is given, which the record then notes.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(make)))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if timed:
        parser.add_argument("--busy", action="store_true", help="measure on a busy machine all the same: no result")
    placed: list[str] = []
    rest: str | None = None
    hints = get_type_hints(make, include_extras=True)
    for parameter in inspect.signature(make).parameters.values():
        name, how, required = parameter.name, _reading(hints[parameter.name]), parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = name
            parser.add_argument(name, **how | {"nargs": "*"})
        elif required and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            placed.append(name)
            parser.add_argument(name, **how)
        else:
            how |= {"required": True} if required else {"default": parameter.default}
            parser.add_argument(f"--{name.replace('_', '-')}", **how)
    given = vars(parser.parse_intermixed_args())
    if timed and not given.pop("busy") and is_busy():
        parser.error(f"{machine()['busy_cores']} cores are busy with other work: timings would mean nothing (--busy)")
    values = [given.pop(name) for name in placed] + (given.pop(rest) if rest is not None else [])
    return make(*values, **given)


def _reading(hint: Any) -> dict[str, Any]:
    """Return the argparse arguments that read a value of this type."""
    how: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, text, *choices = get_args(hint)
        how |= {"help": text} | ({"choices": choices[0]} if choices else {})
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if get_origin(hint) is Sequence:
        (hint,) = get_args(hint)
        how["nargs"] = "*"
    if get_origin(hint) is Literal:
        how["choices"] = get_args(hint)
        hint = type(how["choices"][0])
    return how | ({"action": "store_true"} if hint is bool else {"type": hint})


# The machine and the record.


@cache
def machine() -> dict[str, Any]:
    """Return the machine facts of this process, as found at the first call."""
    facts = _cpu_facts()
    flags = [flag for flag in facts.get("flags", "").split() if flag.startswith(("avx2", "avx512", "amx", "fma"))]
    git = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git there
        commit = ""
    return {
        "device": _device(),
        "cpu": facts.get("model name", platform.processor()),
        "flags": flags,
        "cores": len(os.sched_getaffinity(0)),
        "busy_cores": busy_cores(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed_version(name)) is not None},
        "commit": commit or None,
    }


def busy_cores(sample_s: float = 0.5) -> float:
    """Return the cores that other work uses, over `sample_s` in which this process sleeps."""

    def idle_and_all() -> tuple[int, int]:
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        ticks = [[int(x) for x in found[1:9]] for found in lines if found[0] in ours]
        return sum(cpu[3] + cpu[4] for cpu in ticks), sum(map(sum, ticks))

    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        before = idle_and_all()
        time.sleep(sample_s)
        idle, total = (b - a for a, b in zip(before, idle_and_all(), strict=True))
    except OSError:
        return round(os.getloadavg()[0], 2)
    return round(len(ours) * (1 - idle / max(total, 1)), 2)


def is_busy() -> bool:
    """Whether other work makes timings meaningless. OpenMP threads that wait for each other spin, so a program with as
    many threads as cores can be tens of times slower next to other work."""
    return bool(machine()["busy_cores"] > BUSY_CORES)


def _device() -> str:
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else "cpu"


def _cpu_facts() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write(out: Path, question: str, found: Mapping[str, Any], *, settings: Mapping[str, Any], **of: Any) -> None:
    """Write the record: question, machine, settings (seed, threads, cold or warm) and results. Further keywords are
    machine facts that only this benchmark needs."""
    record = {"question": question, "machine": machine() | of, "settings": dict(settings), **found}
    save(out, record)
    print(f"wrote {out}", flush=True)


def save(out: Path, record: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def markdown(head: str | Sequence[object], rows: Sequence[str | Sequence[object]]) -> str:
    """Render a table. Cells come as a sequence, or in one string with " | " between them."""
    lines = [line if isinstance(line, str) else " | ".join(map(str, line)) for line in (head, *rows)]
    rule = "---|" * (lines[0].count(" | ") + 1)
    return "\n".join([f"| {lines[0]} |", f"|{rule}", *(f"| {line} |" for line in lines[1:])])


def replace_block(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME: begin -->` and its end. Raises ValueError if the page lacks the marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page.name} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def relinked(text: str, page: Path, beside: Path) -> str:
    """Return the text of a page for another file, `beside`: its links to `../` lead to the same files."""
    return text.replace("](../", f"]({os.path.relpath(page.parent.parent, beside.parent)}/")


# Measurement.


def in_turns(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every contestant, `repeats` times behind `warm_up` that do not count; another one begins each turn, so
    that whatever else happens on the machine meets them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(-warm_up, repeats):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            start_s = clock()
            contestants[name]()
            if turn >= 0:
                seconds[name].append(clock() - start_s)
    return seconds


def paired(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the ratio of two contestants, paired by turn: see `interval`."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def interval(values: ArrayLike) -> dict[str, float]:
    """Return the median with its 95 % bootstrap interval."""
    found = np.asarray(values, float)
    draws = np.random.default_rng(0).integers(0, len(found), (DRAWS, len(found)))
    low, high = np.quantile(np.median(found[draws], axis=1), (0.025, 0.975))
    return {"median": round(median(found.tolist()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def ratio_of_rates(ours: NDArray[Any], theirs: NDArray[Any]) -> dict[str, float]:
    """Return the ratio of two rates over the same cases ([N, 2]: gained, spent), with an interval over
    draws of cases."""
    draws = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))

    def ratio(rows: NDArray[Any]) -> NDArray[Any]:
        a, b = ours[rows].sum(-2), theirs[rows].sum(-2)
        return np.asarray(a[..., 0] / a[..., 1] / (b[..., 0] / b[..., 1]))

    low, high = np.quantile(ratio(draws), (0.025, 0.975))
    found = {"median": ratio(np.arange(len(ours))), "low": low, "high": high}
    return {name: round(float(value), 4) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a command, and its seconds. `code` None: it was stopped at its limit."""

    code: int | None
    seconds: float
    tail: str  # end of its output

    @property
    def text(self) -> str:
        return f"stopped after {self.seconds:.0f} s" if self.code is None else f"exit code {self.code}"


def attempt(words: Sequence[str], log: Path, limit_s: float) -> Outcome:
    """Run a command in the repository with its output in `log`. At the limit it is killed with all of its children."""
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
    return Outcome(code, round(time.monotonic() - start_s, 1), "\n".join(tail))


def quantiles_ms(seconds: ArrayLike) -> dict[str, float]:
    points = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}
    found = np.asarray(seconds, float) * 1e3
    return {"count": len(found)} | {name: round(float(np.quantile(found, q)), 3) for name, q in points.items()}
