"""How much of the variance of an RL step's gradient an allocation saves: `python -m experiments.allocation`.

No model: prompts are a solve rate and a length. Rates drift up and wander; rewards and lengths are drawn; each
allocator sees what its own counts would have shown it, and is judged by the variance of the true rates (DUET, equation
1), at the tokens that its counts truly cost. Beside the product's rule, with what it learns: the paper's (running mean
of the variance; spreads below the 5th percentile after the first epoch count as that, A.3); the true spreads and
lengths, in whole counts within the bounds; and the bound of Cauchy and Schwarz. `even` prompts are like the demo's; of
`heavy` ones two fifths are hardly ever solved, three tenths nearly always, and hard ones are long. Also finds the
constants of policies.token_budget.spread. Exact, the same on every machine.

Owns `results/allocation.{json,md}`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT, command, markdown, write
from policies.token_budget.allocation import allocate, variance
from policies.token_budget.cost import CostModel, Visit
from policies.token_budget.spread import PRIOR, RETAINED, SpreadModel

Floats = NDArray[np.float64]
Kind = Literal["even", "heavy"]
OUT = ROOT / "experiments/results/allocation.json"
PROMPTS, PER_STEP, EPOCHS = 96, 16, 4
LEAST = 2
MOST = 4  # times the usual number
LIMIT_TOKENS = 400
NOISE = 0.5  # std of the log of a response's length, given its prompt
WANDER = 0.08  # std of what a step adds to a prompt's log-odds
KINDS: tuple[Kind, ...] = ("even", "heavy")
SIZES = ((8, 1.0), (8, 0.5), (32, 1.0), (32, 0.5), (32, 0.25))  # (usual, share)
PRIORS, RETENTIONS = (1.0, 2.0, 4.0, 8.0, 16.0), (0.25, 0.5, 0.75, 1.0)


class Spreads(Protocol):
    """What an allocator knows of spreads."""

    def spread(self, prompt_id: int) -> float: ...
    def observe(self, prompt_id: int, variance: float, responses: int) -> None: ...


class PaperSpreads:
    """DUET, equation (3) and A.3: a running mean per prompt; a floor, small at first, frozen after the first epoch."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = defaultdict(list)
        self._floor = 1e-3

    def spread(self, prompt_id: int) -> float:
        seen = self._seen.get(prompt_id)
        return max(float(np.sqrt(np.mean(seen))) if seen else 0.0, self._floor)

    def observe(self, prompt_id: int, variance: float, responses: int) -> None:
        self._seen[prompt_id].append(variance)

    def first_epoch_done(self) -> None:
        spreads = [float(np.sqrt(np.mean(seen))) for seen in self._seen.values()]
        self._floor = max(float(np.quantile(spreads, 0.05)), 1e-6)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is played."""

    kind: Kind
    usual: int  # responses of a prompt at full budget
    share: float


def population(kind: Kind, rng: np.random.Generator, prompts: int) -> tuple[Floats, Floats, float]:
    """(log-odds of being solved, mean length in tokens, what a step adds to all log-odds)."""
    if kind == "even":
        return rng.normal(-0.1, 0.35, prompts), np.exp(rng.normal(4.0, 0.12, prompts)), 0.053
    which = rng.random(prompts)
    middle, high = rng.normal(0, 1, prompts), rng.normal(3, 1, prompts)
    odds = np.where(which < 0.4, rng.normal(-5, 1, prompts), np.where(which < 0.7, middle, high))
    return odds, np.exp(4.5 - 0.25 * np.clip(odds, -4, 4) + rng.normal(0, 0.4, prompts)), 0.05


def play(setting: Setting, makers: Mapping[str, Callable[[], Spreads]], seed: int) -> dict[str, Floats]:
    """[epochs] the mean variance of each allocator, and of `equal`, `known` and `bound`."""
    s, rng, draws = setting, np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    odds, lengths, drift = population(s.kind, rng, PROMPTS)
    known = {name: (make(), CostModel(LIMIT_TOKENS / 2)) for name, make in makers.items()}
    sums = {name: np.zeros(EPOCHS) for name in (*makers, "equal", "known", "bound")}
    most = MOST * s.usual
    for epoch in range(EPOCHS):
        for ids in rng.permutation(PROMPTS).reshape(-1, PER_STEP).tolist():
            odds = odds + drift + rng.normal(0, WANDER, PROMPTS)
            rates, tokens = 1 / (1 + np.exp(-odds[ids])), lengths[ids]
            spread, budget = np.sqrt(rates * (1 - rates)), s.share * s.usual * float(tokens.sum())
            solved = draws.random((PER_STEP, most)) < rates[:, None]
            drawn = tokens[:, None] * np.exp(draws.normal(-(NOISE**2) / 2, NOISE, (PER_STEP, most)))
            drawn = np.ceil(drawn).astype(int)
            sums["equal"][epoch] += variance(spread, np.full(PER_STEP, s.share * s.usual))
            sums["bound"][epoch] += float((spread * np.sqrt(tokens)).sum()) ** 2 / budget / PER_STEP**2
            best = allocate(spread, tokens, budget, least=LEAST, most=most).counts
            sums["known"][epoch] += variance(spread, best) * float((best * tokens).sum()) / budget
            for name, (spreads, model) in known.items():
                guess = np.array([spreads.spread(i) for i in ids])
                costs = np.array([model.expected_tokens(i) for i in ids])
                counts = allocate(guess, costs, s.share * s.usual * float(costs.sum()), least=LEAST, most=most).counts
                sums[name][epoch] += variance(spread, counts) * float((counts * tokens).sum()) / budget
                visits = []
                for i, own, sizes, n in zip(ids, solved, drawn, counts.tolist(), strict=True):
                    spreads.observe(i, float(own[:n].var(ddof=1)), n)
                    visits.append(Visit(i, sizes[:n].tolist(), [1.0] * n, [False] * n))
                model.observe(visits)
        for spreads, _ in known.values():
            if epoch == 0 and isinstance(spreads, PaperSpreads):
                spreads.first_epoch_done()
    return {name: total / (PROMPTS // PER_STEP) for name, total in sums.items()}


def compare(setting: Setting, makers: Mapping[str, Callable[[], Spreads]], seeds: int) -> dict[str, list[float]]:
    """By name: [whole, after the first epoch], as shares of the variance of equal counts, over `seeds` worlds; and the
    standard error of the first."""
    worlds = [play(setting, makers, seed) for seed in range(seeds)]
    equal = np.array([world["equal"] for world in worlds])
    found = {}
    for name in (*makers, "known", "bound"):
        own = np.array([world[name] for world in worlds])
        whole, later = own.sum() / equal.sum(), own[:, 1:].sum() / equal[:, 1:].sum()
        error = (own.sum(1) - whole * equal.sum(1)).std(ddof=1) / equal.sum(1).mean() / np.sqrt(seeds)
        found[name] = [round(float(value), 4) for value in (whole, later, error)]
    return found


def table(rows: Sequence[Mapping[str, Any]], scan: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown."""
    head = "prompts | full | budget | Paceline | after the first epoch | the paper's rule | all known | bound"
    lines = [
        f"{row['kind']} | {row['usual']} | {row['share']:g} | {row['ours'][0]:.3f} +- {2 * row['ours'][2]:.3f} | "
        f"{row['ours'][1]:.3f} | {row['paper'][0]:.3f} +- {2 * row['paper'][2]:.3f} | {row['known'][0]:.3f} | "
        f"{row['bound'][0]:.3f}"
        for row in rows
    ]
    priors = [[f"prior {prior}", *(f"{value:.3f}" for value in by.values())] for prior, by in scan.items()]
    return "\n".join(
        [
            "# Variance of an allocation\n",
            "As a share of that of equal counts at the same tokens (1: nothing saved): mean of simulated worlds, two "
            "standard errors.",
            "`full`: responses of a prompt at budget 1. It gets 2 at least and 4 times `full` at most, so at a quarter "
            "of 8 there is nothing to share out.",
            "Written by `python -m experiments.allocation`.\n",
            markdown(head, lines),
            f"\nThe constants, heavy prompts at budget 0.5 of 8 (in use: prior {PRIOR:g}, {RETAINED:g} retained):\n",
            markdown(["", *(f"{retained:g} retained" for retained in RETENTIONS)], priors),
            "",
        ]
    )


def main(seeds: int = 40, out: Path = OUT) -> None:
    makers: dict[str, Callable[[], Spreads]] = {"ours": SpreadModel, "paper": PaperSpreads}
    rows = []
    for kind, (usual, share) in product(KINDS, SIZES):
        setting = Setting(kind=kind, usual=usual, share=share)
        rows.append({"kind": kind, "usual": usual, "share": share, **compare(setting, makers, seeds)})
        print(rows[-1], flush=True)
    grid = {(p, r): (lambda p=p, r=r: SpreadModel(p, r)) for p, r in product(PRIORS, RETENTIONS)}
    named = {f"{p:g} {r:g}": make for (p, r), make in grid.items()}
    found = compare(Setting(kind="heavy", usual=8, share=0.5), named, seeds)
    scan = {f"{p:g}": {f"{r:g}": found[f"{p:g} {r:g}"][0] for r in RETENTIONS} for p in PRIORS}
    sizes = {"prompts": PROMPTS, "per_step": PER_STEP, "epochs": EPOCHS}
    settings = {"seeds": seeds, **sizes}
    write(out, "the variance that an allocation saves", {"rows": rows, "constants": scan}, settings=settings)
    out.with_suffix(".md").write_text(table(rows, scan), encoding="utf-8")


if __name__ == "__main__":
    command(main, timed=False)
