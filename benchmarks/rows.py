"""The rows of docs/results/README.md as `make bench` runs them: the script, its short options, its record's figures.

Owns no measurement and no process. A row's figures are read in the same way from the committed record and from the new
one, including older records. A placeholder such as {trl} in its options needs something that not every machine has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import paired

Record = Mapping[str, Any]
MS = " ms"
NEEDS = {
    "vllm": "vLLM in an interpreter of its own: `make install-vllm`, or VLLM_PYTHON=PATH",
    "trl": "TRL in an interpreter of its own: TRL_PYTHON=PATH",
    "arctic": "arctic-inference's extension and ../shared/data: ARCTIC=PATH",
    "demo": "a model of the demo: the row seeds makes one",
}
BY_HAND = ("ablation", "whole_run")  # experiments of many whole runs each


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a record with its interval."""

    name: str
    value: float
    low: float
    high: float
    unit: str = "x"

    @classmethod
    def of(cls, name: str, found: Any, unit: str = "x") -> "Figure":
        """`found`: a number, or a median with the ends of its interval under any of their past names."""
        if not isinstance(found, Mapping):
            return cls(name, found, found, found, unit)
        value, low, high = (
            next(found[key] for key in keys if key in found)
            for keys in (("median", "ratio"), ("low", "lowest"), ("high", "highest"))
        )
        return cls(name, value, low, high, unit)

    def moved(self, before: "Figure", noise: float) -> bool:
        """Whether the two intervals are further apart than `noise`, a share of the committed value."""
        return max(self.low - before.high, before.low - self.high) > noise * abs(before.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A script with short options. `noise`: the change of a figure expected from another machine or a short run."""

    script: str
    options: str = ""
    figures: Callable[[Record], Iterator[Figure]]
    limit_s: float
    noise: float = 0.10
    record: str = ""  # its file in results/, if the name differs
    first: str = ""  # a command to run before it
    timed: bool = True  # accepts --busy


def engine(*others: str) -> Callable[[Record], Iterator[Figure]]:
    def figures(record: Record) -> Iterator[Figure]:
        for row in record["rows"]:
            for other in others:
                if (row["case"] == "batch 1" or "tail" in row["case"]) and other in row["seconds"]:
                    name = f"{other} / ours: {row['model']} {row['dtype']}, {row['case']}"
                    yield Figure.of(name, paired(row["seconds"][other], row["seconds"]["native-fast"]))

    return figures


def rl_step(record: Record) -> Iterator[Figure]:
    for name in ("speedup_step", "speedup_tokens_per_s"):
        if name in record:
            yield Figure.of(name, record[name])


def learner(record: Record) -> Iterator[Figure]:
    variants = record["variants"]
    yield Figure.of("tokens/s, packed / padded", paired(variants["padded"]["step_s"], variants["packed"]["step_s"]))
    for name in ("packed", "padded"):
        yield Figure.of(f"memory, {name}", variants[name]["peak_memory_mib"], " MiB")


def rollout(record: Record) -> Iterator[Figure]:
    for case in record["cases"]:
        for name in ("adaptive", "cold", "hostile", "hostile, cold"):
            if (found := case["contenders"].get(name)) is None:
                continue  # a record of an older release
            spread = {"median": found["speedup"], "low": min(found["speedups"]), "high": max(found["speedups"])}
            yield Figure.of(f"{name}: {case['target']} {case['dtype']}, {case['requests']} requests", spread)


def rollout_vllm(record: Record) -> Iterator[Figure]:
    for case in record.get("cases", ()):
        for name in ("paceline", "paceline, cold"):
            found = case["contenders"][name]
            spread = {"median": found["speedup"], "low": min(found["speedups"]), "high": max(found["speedups"])}
            yield Figure.of(f"{name}: {case['target']} {case['dtype']}, {case['requests']} requests", spread)


def suffix(record: Record) -> Iterator[Figure]:
    for name, of in record["sets"].items():
        for tokens, row in of.items():
            for depth in (24, 64):
                found = row[f"over arctic-{depth}"]["draft_speedup"]
                yield Figure.of(f"draft, arctic-{depth} / ours: {name}, {tokens} tokens", found)


def acceptance(record: Record) -> Iterator[Figure]:
    for temperature, ways in record["first_token"].items():
        for way, share in ways.items():
            if "children" not in way:
                yield Figure.of(f"first draft accepted, T = {temperature}: {way}", 100 * share, " %")


def packing(record: Record) -> Iterator[Figure]:
    """Yield figures of the demo after RL, the last of the demos, and of the long tail."""
    cases = {"long tail" if case["case"] == "long tail" else "demo": case for case in record["cases"]}
    for name, case in cases.items():
        yield Figure.of(f"{name}: packed / padded", case["packed_over_padded"])
        yield Figure.of(f"{name}: packed / padded, favoured", case["packed_over_padded_favoured"])


def checkpoint(record: Record) -> Iterator[Figure]:
    for name, target in record["targets"].items():
        found = target["blocking_ratio"]
        if "blocking_ratio_95" in target:
            low, high = target["blocking_ratio_95"]
            found = {"median": found, "low": low, "high": high}
        yield Figure.of(f"{name}: synchronous / ours", found)


def interference(record: Record) -> Iterator[Figure]:
    for name, found in record["ratios"].items():
        yield Figure.of(f"RL step, {name}", found)


def preemption(record: Record) -> Iterator[Figure]:
    for point in ("p50", "p99"):
        found = record["total_ms"]
        yield Figure.of(f"to the first token, {point}", found.get(f"{point}_ms", found.get(point)), MS)


def coordinator(record: Record) -> Iterator[Figure]:
    for found in record["round_trip"]["found"]:
        yield Figure.of(f"round trip p99, sessions of {found['members']}", found["p99_ms"], MS)
    for found in record["preemption"]["found"]:
        worst_ms = found.get("max_ms", found.get("worst_ms"))
        yield Figure.of(f"preemption of {found['workers']}, worst", worst_ms, MS)


def control(record: Record) -> Iterator[Figure]:
    yield Figure.of("control call, p99", max(found["p99_ms"] for found in record["decoding"].values()), MS)


def driver(record: Record) -> Iterator[Figure]:
    for row in record["rows"]:
        yield Figure.of(f"finished rollout, {row['open']:,} open", row["us_per_rollout"], " us")
    for row in record.get("fleet", []):
        name = f"finished rollout, {row['workers']:,} workers, {row['mix']} per batch"
        yield Figure.of(name, row["us_per_rollout"], " us")
    for row in record.get("ray", []):
        name = f"finished rollout, {row['workers']:,} workers of Ray, {row['mix']} per batch"
        yield Figure.of(name, row["us_per_rollout"], " us")


def seeds(record: Record) -> Iterator[Figure]:
    for row in record["seeds"]:
        yield Figure.of(f"held-out reward, seed {row['seed']}: before", row["before"], "")
        yield Figure.of(f"held-out reward, seed {row['seed']}: after", row["after"], "")


ROWS: dict[str, Row] = {
    "seeds": Row(
        script="seeds",
        options="--seeds 0 --run-dir {folder} observe.live=false observe.tensorboard=false",
        figures=seeds,
        limit_s=420,
        noise=0.05,
        record="demo_seeds",
    ),
    "engine_throughput": Row(
        script="engine_throughput",
        options="--contenders native-fast native-invariant generate --models demo --batches 1 --repeats 3",
        figures=engine("generate", "native-invariant"),
        limit_s=300,
        noise=0.15,
    ),
    "engine_vs_vllm": Row(
        script="engine_throughput",
        options="--contenders native-fast vllm --python-for vllm={vllm} --batches 1 --repeats 3",
        figures=engine("vllm"),
        limit_s=600,
        noise=0.15,
    ),
    "rl_step_vs_trl": Row(
        script="rl_step_vs_trl",
        options="--trl-python {trl} --steps 5 --repeats 1",
        figures=rl_step,
        limit_s=300,
        noise=0.15,
    ),
    "learner_packing": Row(script="learner_packing", options="--repeats 5", figures=learner, limit_s=180),
    "rollout": Row(
        script="rollout",
        options="--target {demo} --sizes demo 20m --dtypes float32 --batches 1 2 4 32 --threads 1"
        " --fixed --case-seconds 0 --first-seconds 0",
        figures=rollout,
        limit_s=420,
        noise=0.15,
    ),
    "rollout_vllm": Row(
        script="rollout_vllm",
        options="--vllm-python {vllm} --target {demo} --quick",
        figures=rollout_vllm,
        limit_s=420,
        noise=0.15,
    ),
    "suffix_index": Row(script="suffix_index", options="--arctic {arctic} --folds 1", figures=suffix, limit_s=600),
    "acceptance": Row(
        script="acceptance",
        first="-m benchmarks.tools.fit_eagle --target {demo} --out {folder}/eagle --steps 400",
        options="--target {demo} --eagle {folder}/eagle --requests 96 --temperatures 0.7",
        figures=acceptance,
        limit_s=240,
        noise=0.03,
        timed=False,
    ),
    "drafter_packing": Row(
        script="drafter_packing",
        options="--target {demo} --repeats 3 --sequences 192",
        figures=packing,
        limit_s=240,
        noise=0.15,
    ),
    "drafter_checkpoint": Row(
        script="drafter_checkpoint", options="--repeats 7", figures=checkpoint, limit_s=180, noise=0.15
    ),
    "interference": Row(
        script="interference", options="--steps 20 --folder {folder}", figures=interference, limit_s=360
    ),
    "preemption": Row(script="preemption", options="--preemptions 60", figures=preemption, limit_s=180, noise=0.5),
    "coordinator": Row(
        script="coordinator",
        options="--only round_trip preemption --seconds 5 --rounds 10",
        figures=coordinator,
        limit_s=180,
        noise=0.5,
    ),
    "driver": Row(script="driver", options="--rollouts 4000", figures=driver, limit_s=300, noise=0.5),
    "control_latency": Row(script="control_latency", options="--seconds 8", figures=control, limit_s=120, noise=0.5),
}
