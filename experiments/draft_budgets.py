"""What budgets by length are worth (DAS 4.2, Figures 8 and 12): `python -m experiments.draft_budgets --sweep FILE`.

FILE is a measured sweep of a GPU (benchmarks/tools/decode_sweep.py). Whole rollouts are decoded in virtual time at its
costs, with recorded drafts and drawn lengths (benchmarks/tools/virtual_rollout.py): without drafts; with as long drafts
as the drafter makes; with the depth that is best for all requests of a pass by the true costs and the true acceptance;
and with budgets by length below that depth, as in the product, lengths predicted from nothing at the first step.
Beside it budgets of any depth, and those with lengths known beforehand. Exact, the same on every machine.

Owns `results/draft_budgets.json` and `.svg`; cases are merged into the record one by one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import ROOT, command, markdown, write
from benchmarks.tools.decode_sweep import read
from benchmarks.tools.draft_optimum import best_passes, cost, random_batch, survival
from benchmarks.tools.suffix_data import Problem, read_rollouts, sample_demo
from benchmarks.tools.targets import find_demo
from benchmarks.tools.virtual_rollout import (
    DEPTH,
    DRAFT_REQUEST_S,
    DRAFT_S,
    FloatArray,
    Int64Array,
    Lengths,
    Replays,
    Requests,
    Rollout,
    SweepCosts,
    plain_s,
    rollout,
)
from benchmarks.tools.virtual_rollout import draw as draw_requests
from config.strategy import Strategy
from policies.speculation.length_aware import LengthAwareBudget, cheapest_depths, waiting_shares
from policies.steps import Load

RESULTS = ROOT / "experiments" / "results"
CAP = 8192  # tokens of the longest response
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, DEPTH)  # that all requests may draft to
SOURCES = {"math": "rollouts_qwen25math_100x8.jsonl.gz", "gsm8k": "rollouts_gsm8k_gpt3_4each.jsonl.gz"}
POLICIES = ("off", "unlimited", "adaptive", "length-aware", "any depth", "lengths known")
QUESTION = "rollouts in virtual time at a GPU's costs: what are draft budgets by length worth?"


class Acceptance:
    """What the replays' drafts are worth, known: implements length_aware.Survival."""

    def __init__(self, replays: Replays) -> None:
        self.drafted, self.accepted = replays.survival()

    def survival(self, strategy: Strategy, prompt_ids: Int64Array) -> tuple[FloatArray, FloatArray]:
        return self.drafted[prompt_ids, : strategy.depth], self.accepted[prompt_ids, : strategy.depth]


class Unlimited:
    """All that the drafter says."""

    def begin(self, request: int, slot: int, requests: Requests) -> None:
        pass

    def end(self, slot: int, drawn: int, cap: int) -> None:
        pass

    def new_step(self, requests: Requests) -> None:
        pass

    def depths(self, load: Load, slots: Int64Array, drawn: Int64Array, cap: int) -> Int64Array | None:
        return np.full(load.running, DEPTH)


class Adaptive(Unlimited):
    """The depth for all that brings most tokens per second: what the adaptive choice would be if it knew all."""

    def __init__(self, costs: SweepCosts, acceptance: Acceptance) -> None:
        self._costs = costs
        self._rows = np.concatenate([[0], acceptance.drafted[-1].cumsum()])
        self._tokens = np.concatenate([[0], acceptance.accepted[-1].cumsum()]) + 1
        self._best: dict[tuple[int, int], int] = {}

    def best(self, load: Load) -> int:
        key = load.running, int(4 * np.log2(load.context_tokens / load.running))
        if key not in self._best:
            self._best[key] = max(DEPTHS, key=partial(self._speed, load))
        return self._best[key]

    def _speed(self, load: Load, depth: int) -> float:
        rows = load.running * (1 + float(self._rows[depth]))
        draft_s = DRAFT_S + DRAFT_REQUEST_S * load.running if depth else 0.0
        return float(self._tokens[depth]) / (self._costs.step_s(load.running, rows, load.context_tokens) + draft_s)

    def depths(self, load: Load, slots: Int64Array, drawn: Int64Array, cap: int) -> Int64Array | None:
        best = self.best(load)
        return np.full(load.running, best) if best else None


class Aware(Unlimited):
    """The product's budgets over the longest chain, or over the depth that is best for all."""

    def __init__(self, budget: LengthAwareBudget, adaptive: Adaptive, *, capped: bool) -> None:
        self._budget, self._adaptive, self._capped = budget, adaptive, capped

    def begin(self, request: int, slot: int, requests: Requests) -> None:
        self._budget.begin(slot, requests.problems[request : request + 1].astype(np.int32), 0, CAP)

    def end(self, slot: int, drawn: int, cap: int) -> None:
        self._budget.end(slot, drawn, finished=True, ended=drawn < cap)

    def new_step(self, requests: Requests) -> None:
        self._budget.new_target()

    def depths(self, load: Load, slots: Int64Array, drawn: Int64Array, cap: int) -> Int64Array | None:
        best = self._adaptive.best(load)
        depth = best if self._capped else DEPTH
        if not depth:
            return None
        room = cap - drawn - 1
        given = self._budget.budgets(load, slots, drawn, room, Strategy("suffix", depth))
        return np.full(load.running, best) if (given >= room).all() else np.minimum(given, depth)


class Knowing(LengthAwareBudget):
    """Lengths are no guess."""

    lengths: Int64Array  # by slot

    def left(self, slots: Int64Array, drawn: Int64Array, room: Int64Array) -> FloatArray | None:
        return (self.lengths[slots] - drawn)[None].astype(np.float64)


class Oracle(Aware):
    """Budgets by length that is known."""

    def __init__(self, budget: Knowing, adaptive: Adaptive, slots: int) -> None:
        super().__init__(budget, adaptive, capped=False)
        self._knowing = budget
        budget.lengths = np.zeros(slots, np.int64)

    def begin(self, request: int, slot: int, requests: Requests) -> None:
        self._knowing.lengths[slot] = requests.lengths[request]

    def end(self, slot: int, drawn: int, cap: int) -> None:
        pass


def simulate(
    replays: Replays, costs: SweepCosts, lengths: Lengths, *, count: int, slots: int, steps: int
) -> dict[str, Any]:
    """A row of the record: the same steps for every policy."""
    acceptance, places = Acceptance(replays), min(count, slots)
    adaptive = Adaptive(costs, acceptance)
    policies = {
        "unlimited": Unlimited(),
        "adaptive": adaptive,
        "length-aware": Aware(LengthAwareBudget(costs, acceptance, places), adaptive, capped=True),
        "any depth": Aware(LengthAwareBudget(costs, acceptance, places), adaptive, capped=False),
        "lengths known": Oracle(Knowing(costs, acceptance, places), adaptive, places),
    }
    linear = line(*costs.passes())
    found: dict[str, list[Rollout]] = {name: [] for name in policies}
    off_s = []
    for step in range(steps):
        requests = draw_requests(replays, lengths, step, steps, count)
        off_s.append(plain_s(requests, costs, slots=places))
        for name, policy in policies.items():
            found[name].append(rollout(replays, requests, costs, policy, cap=CAP, slots=places, linear=linear))
    seconds = {"off": off_s} | {name: [one.seconds for one in of] for name, of in found.items()}
    later = slice(steps // 2, None)
    return {
        "requests": count,
        "slots": places,
        "steps": steps,
        "tokens": sum(one.tokens for one in found["adaptive"]),
        "of_adaptive": {name: _ratio(of, seconds["adaptive"]) for name, of in seconds.items()},
        "later_half": {name: _ratio(of[later], seconds["adaptive"][later]) for name, of in seconds.items()},
        "seconds_per_step": {name: round(fmean(of), 3) for name, of in seconds.items()},
        "drafts_accepted": {
            name: round(sum(r.accepted for r in of) / max(sum(r.drafted for r in of), 1), 3)
            for name, of in found.items()
        },
        "rows_per_token": {
            name: round(sum(r.rows for r in of) / sum(r.tokens for r in of), 3) for name, of in found.items()
        },
        # Of whole rollouts, by eq. (1).
        "linear_error": round(fmean(abs(r.linear_s / r.seconds - 1) for of in found.values() for r in of), 4),
        "seconds": {name: [round(value, 2) for value in of] for name, of in seconds.items()},
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(sum(ours) / sum(theirs), 4)


def line(rows: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """(base, row) of eq. (1), by least squares of relative errors."""
    design = np.stack([1 / seconds, rows / seconds], axis=1)
    base, row = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    return float(base), float(row)


def figure_8(rows: FloatArray, seconds: FloatArray) -> dict[str, Any]:
    """Eq. (1) over measured passes."""
    base, row = line(rows, seconds)
    errors = np.abs((base + row * rows) / seconds - 1)
    return {
        "passes": len(rows),
        "base_ms": round(base * 1e3, 4),
        "row_ms": round(row * 1e3, 5),
        "ratio": round(base / row, 1),
        "mean_relative_error": round(float(errors.mean()), 4),
    }


def optimum(instances: int = 300) -> dict[str, Any]:
    """In the idealised world of (6), lengths known: cost beyond the optimum's, on random batches; mean and worst."""
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"no drafts": [], "the paper's objective": [], "equal prices": [], "ours": []}
    for _ in range(instances):
        batch, ratio = random_batch(rng)
        best = cost(batch, batch.drafted(best_passes(batch, ratio)), ratio)
        most = float((batch.drafted(best_passes(batch, 1e5)) / batch.lengths).max()) + 1
        efforts = np.concatenate([[0], np.geomspace(1e-3, most, 1000)])
        drafted, tokens = survival(batch, efforts)
        shares = {
            "equal prices": np.full(len(batch.lengths), 1 / len(batch.lengths)),
            "ours": waiting_shares(batch.lengths[None]),
        }
        plans = {
            "no drafts": 0 * batch.lengths,
            "the paper's objective": batch.drafted(best_passes(batch, ratio, exchange=0)),
        }
        for name, share in shares.items():
            plans[name] = efforts[cheapest_depths(ratio * share, 1.0, drafted, tokens, slack=0.0)] * batch.lengths
        for name, plan in plans.items():
            found[name].append(cost(batch, plan, ratio) / best - 1)
    return {name: {"mean": round(fmean(of), 4), "worst": round(max(of), 4)} for name, of in found.items()}


def problems_of(source: str, data: Path, demo: Path | None) -> list[Problem]:
    if source == "demo":
        return sample_demo(find_demo(demo))
    return read_rollouts(data / SOURCES[source])[:300]


def stretched(replays: Replays) -> Lengths:
    """Spreads as recorded, so long that one response in a hundred would exceed the cap."""
    between, within = replays.spreads()
    median = CAP / np.exp(2.33 * np.hypot(between, within))
    return Lengths(median=float(median), cap=CAP, between=between, within=within)


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [case, *(f"{row['of_adaptive'][name]:.3f}" for name in POLICIES), f"{row['seconds_per_step']['adaptive']:.1f}"]
        for case, row in cases.items()
    ]
    return markdown(["drafts, requests", *POLICIES, "adaptive, s per step"], rows)


def plot(path: Path, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Figure 12: seconds of every step."""
    panels = []
    for case, row in cases.items():
        if row["requests"] not in (32, 128) or row["slots"] != row["requests"]:
            continue
        lines = []
        for name in POLICIES:
            if name != "any depth":
                smooth = np.convolve(row["seconds"][name], np.ones(7) / 7, mode="valid")
                lines.append(Line(name, [(step + 4.0, float(value)) for step, value in enumerate(smooth)]))
        panels.append(Panel(title=case, lines=lines, x_label="RL step (mean of 7)", y_label="rollout, s (virtual)"))
    if panels:
        draw(path, panels, columns=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    sweep: Annotated[Path, "CSV of a measured sweep"]
    data: Annotated[Path, "directory of recorded rollouts"] = ROOT.parent / "shared/data"
    demo: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sources: Annotated[Sequence[str], "of drafts", (*SOURCES, "demo")] = (*SOURCES, "demo")
    requests: Annotated[Sequence[int], "per step"] = (16, 32, 64, 128)
    slots: Annotated[int, "at once, at most"] = 128
    steps: int = 104
    out: Path = RESULTS / "draft_budgets.json"


def main(options: Options) -> None:
    costs, out = SweepCosts(read(options.sweep)[0]), options.out
    for source in options.sources:
        replays = Replays.of(problems_of(source, options.data, options.demo))
        lengths = stretched(replays)
        for count in options.requests:
            case = f"{source}, {count}" + (f" over {options.slots} places" if count > options.slots else "")
            found = simulate(replays, costs, lengths, count=count, slots=options.slots, steps=options.steps)
            print(case, found["of_adaptive"], flush=True)
            record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            cases = record.get("cases", {}) | {case: found}
            order = sorted(cases, key=lambda name: (name.split(",")[0], cases[name]["slots"], cases[name]["requests"]))
            parts = {
                "linear": figure_8(*costs.passes()),
                "optimum": optimum(),
                "cases": {name: cases[name] for name in order},
            }
            write(out, QUESTION, parts, settings={"sweep": options.sweep.name, "cap": CAP, "depth": DEPTH})
            plot(out.with_suffix(".svg"), parts["cases"])
    print(table(parts["cases"]))


if __name__ == "__main__":
    main(command(Options, timed=False))
