"""How many drafted tokens stand, by depth: learned from every verification. Owns no cost and no choice.

A drafter's chains share one table, each of its trees has its own. Per level of depth it counts how often a draft that
stood so far goes on, and how often what it then says stands: a drafter which says little is not taken for one that is
wrong. A level borrows from the one above it, the first from what the drafter's kind promises, a tree's from the chain's
and a problem's from the pool's: what was never tried is extrapolated, and what was tried little is shrunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from config.catalogue import CATALOGUE
from config.strategy import Strategy
from policies.steps import NO_REQUESTS, Int64Array, StepOutcome

Float64Array = NDArray[np.float64]

BORROWED = 4.0  # request-steps of which what is borrowed weighs as much as one's own
HOPED = 2.0  # standard errors by which an optimist takes a share for larger than it was seen
MEMORY = 512.0  # request-steps of its own after which what a table saw counts for half: change is followed
DOUBT = 1024.0  # engine steps without it after which it does too: what lost long ago may have become better
RENEWED = 32.0  # request-steps that count of older weights: new ones are mostly the old ones moved a little
PROBLEMS = 1024  # of which something is remembered; the one not seen for longest leaves

# Counts, per level: drafts that could have gone on to it, did, stood there; and in drafting could have, did.
_TRIED, _OFFERED, _STOOD, _COULD, _MADE = range(5)


@dataclass(frozen=True, slots=True)
class Expected:
    """Per request and step, for every arm in the order given; [arms]."""

    accepted: Float64Array
    hoped: Float64Array  # accepted, at best
    rows: Float64Array  # drafted nodes that the target verifies


class AcceptanceModel:
    """Of the drafters that `arms` name. Deterministic; a digest of a hold takes some tens of microseconds."""

    def __init__(self, arms: Sequence[Strategy], accepts: Mapping[str, float] | None = None) -> None:
        """accepts: by drafter, the share of its tokens that is expected to stand before anything is known."""
        arms = [arm for arm in arms if arm.depth]
        drafters = list(dict.fromkeys(arm.drafter for arm in arms))
        trees = list(dict.fromkeys(arm for arm in arms if arm.is_tree))
        chains = {name: table for table, name in enumerate(drafters)}
        self._table = {arm: chains[arm.drafter] for arm in arms}  # a drafter's chains share one, each tree has its own
        self._table |= {tree: len(drafters) + i for i, tree in enumerate(trees)}
        self._chains = len(drafters)
        self._chain_of = np.array([chains[tree.drafter] for tree in trees], np.int64)  # [trees] tables
        width = max((arm.depth for arm in arms), default=1)
        tables = max(len(drafters) + len(trees), 1)
        self._at = np.array([self._table[arm] for arm in arms], np.int64), np.array([a.depth for a in arms], np.int64)
        # P a draft goes on, P its token stands, P it goes on in drafting: before anything was seen.
        first = [_first(name, accepts or {}) for name in drafters] or [(0.5, 0.5)]
        self._first = np.array([(on, stands, on) for on, stands in first]).T[:, :, None]  # [3, chains, 1]
        self._counts = np.zeros((5, tables, width))
        self._shares = np.zeros(
            (5, tables, width)
        )  # estimated: P it goes on, stands; both at best; goes on in drafting
        self._nodes = np.zeros(tables)  # drafted
        self._widths = np.array([tree.tokens_to_verify / tree.depth for tree in trees])  # nodes per level, at first
        self._fill = np.ones(tables)  # nodes per level, as drafted
        self._fresh = np.zeros(tables)  # request-steps of them since the drafter's memory grew last
        self._clock = 0.0  # engine steps
        self._stale = True  # the shares
        self._slots: dict[int, int] = {}  # by problem, the one not seen for longest first; slot 0 is nobody's
        self._seen = np.zeros(1 + PROBLEMS)  # clock
        self._problems = np.zeros((tables, 1 + PROBLEMS, 5, width), np.float32)  # counts
        self._batch = _Batch(NO_REQUESTS, np.zeros(1, np.int64))

    def seen(self, strategy: Strategy) -> float:
        """Request-steps that count of its table."""
        return float(self._counts[_COULD, self._table[strategy], 0])

    def learn(self, strategy: Strategy, outcomes: Sequence[StepOutcome]) -> None:
        """Steps that drafted by it; those that drafted nothing say that it had nothing to say."""
        table = self._table.get(strategy)
        if table is None or not outcomes:
            return
        depth = min(strategy.depth, self._counts.shape[2])
        found = np.zeros(self._counts.shape[::2])
        drafts = 0
        for _, same in groupby(outcomes, lambda outcome: id(_prompts_of(outcome))):
            steps = list(same)
            drafted, stood, cap = (
                np.concatenate([of(step) for step in steps]) for of in (_drafted, _stood, partial(_cap, depth))
            )
            went_on = np.minimum(stood + 1, cap), stood + (drafted > stood), stood  # tried, offered, stood
            levels = np.stack((*went_on, np.minimum(drafted + 1, cap), drafted))
            found += self._count(table, _prompts_of(steps[0]), levels)
            drafts += len(drafted)
        keep = 0.5 ** (drafts / MEMORY)
        self._counts[:, table] = keep * self._counts[:, table] + found
        self._nodes[table] = keep * self._nodes[table] + sum(outcome.drafted for outcome in outcomes)
        self._fresh[table] = keep * self._fresh[table] + drafts
        self.passed(len(outcomes), table)

    def passed(self, steps: int, drafting: int | None = None) -> None:
        """So many engine steps were made, by that table's strategies or plainly: doubt of all others grows."""
        self._clock += steps
        keep = np.full(len(self._nodes), 0.5 ** (steps / DOUBT))
        if drafting is not None:
            keep[drafting] = 1.0
        self._counts *= keep[:, None]
        self._nodes *= keep
        self._stale = True

    def renewed(self, drafter: str) -> None:
        """It has new weights: what was seen of the old ones is where to begin."""
        for table in {table for arm, table in self._table.items() if arm.drafter == drafter}:
            keep = min(1.0, RENEWED / max(self._counts[_COULD, table, 0], 1e-9))
            self._counts[:, table] *= keep
            self._nodes[table] *= keep
            self._problems[table] *= keep
        self._stale = True

    def grown(self, drafter: str) -> None:
        """It knows more texts than before: what was seen is what to expect, but no reason to hope for no more. One that
        was tried while it knew nothing is tried again."""
        for table in {table for arm, table in self._table.items() if arm.drafter == drafter}:
            self._fresh[table] = 0.0
        self._stale = True

    def expected(self, prompt_ids: Int64Array) -> Expected:
        """The mean over these requests; empty: over the pool."""
        batch = self._batch_of(prompt_ids)
        means = np.matmul(batch.shares, self._lives(slice(None), batch.found)).cumsum(2)
        tables, depths = self._at
        accepted, hoped, rows = means[:, tables, depths - 1]
        return Expected(accepted, hoped, rows * self._fill[tables])

    def survival(self, strategy: Strategy, prompt_ids: Int64Array) -> tuple[Float64Array, Float64Array]:
        """(drafted to depth j, accepted to depth j), each [R, strategy.depth] and not cut by any budget."""
        table = self._table[strategy]
        lives = self._lives(slice(table, table + 1), self._batch_of(prompt_ids).slots)[:, 0, :, : strategy.depth]
        return lives[2], lives[0]

    def _lives(self, tables: slice, slots: Int64Array) -> Float64Array:
        """[3, tables, slots, levels]: P a draft stands to the level, at best, and is drafted to it."""
        faded = 0.5 ** ((self._clock - self._seen[slots]) / DOUBT)
        tried, offered, stood, could, made = (self._problems[tables, slots] * faded[:, None, None]).transpose(
            2, 0, 1, 3
        )
        won, of = np.stack((offered, stood, offered, stood, made)), np.stack((tried, offered, tried, offered, could))
        on, stands, hoped_on, hoped_stands, drafts_on = (won + BORROWED * self._shares[:, tables, None]) / (
            of + BORROWED
        )
        return np.stack((on * stands, hoped_on * hoped_stands, drafts_on)).cumprod(3)

    # Problems.

    def _batch_of(self, prompt_ids: Int64Array) -> "_Batch":
        """Engines hand out the same array while the batch is the same."""
        if self._stale:
            self._estimate()
        if prompt_ids is not self._batch.prompt_ids:
            slots = [self._slot(prompt) for prompt in prompt_ids.tolist()] or [0]
            self._batch = _Batch(prompt_ids, np.array(slots, np.int64))
        return self._batch

    def _count(self, table: int, prompt_ids: Int64Array, levels: Int64Array) -> Float64Array:
        """levels: [5, steps * R], to which each kind of count goes. Adds them to the problems'; returns their sum."""
        width = self._counts.shape[2] + 1
        known = len(prompt_ids) and levels.shape[1] % len(prompt_ids) == 0  # else nobody said whose they are
        slots = self._batch_of(prompt_ids).slots if known else np.zeros(1, np.int64)
        which = np.arange(levels.shape[1]) % len(slots)
        found = np.bincount(
            ((which * 5 + np.arange(5)[:, None]) * width + levels).ravel(), minlength=len(slots) * 5 * width
        ).reshape(-1, 5, width)
        counts = found[:, :, ::-1].cumsum(2)[:, :, -2::-1].astype(np.float64)
        if known:
            each = np.unique(slots)
            self._problems[:, each] *= (0.5 ** ((self._clock - self._seen[each]) / DOUBT))[:, None, None]
            self._seen[each] = self._clock
            self._problems[table, each] *= 0.5 ** (levels.shape[1] / len(each) / MEMORY)
            np.add.at(self._problems[table], slots, counts)
        total: Float64Array = counts.sum(0)
        return total

    def _slot(self, prompt: int) -> int:
        slot = self._slots.pop(prompt, 0)
        if not slot:
            full = len(self._slots) >= PROBLEMS
            slot = self._slots.pop(next(iter(self._slots))) if full else len(self._slots) + 1
            self._problems[:, slot] = 0.0
        self._slots[prompt] = slot
        return slot

    # The pool.

    def _estimate(self) -> None:
        """Every level borrows from the one above it, or a tree's from the chain's."""
        self._stale = False
        # Hope is of what was seen since the memory grew.
        seen = self._counts[_COULD, :, 0]
        grown = self._fresh < 0.999 * seen
        counts = self._counts[:, None]
        if grown.any():  # both at once: arrays so small cost their calls, not their elements
            lately = np.where(grown, self._fresh / np.maximum(seen, 1e-9), 1.0)
            counts = np.stack((self._counts, self._counts * lately[:, None]), 1)
        shares, of = self._of(counts)
        likely, sure = shares[:2, -1], of[:2, -1]
        hoped = np.minimum(likely + HOPED * np.sqrt(likely * (1 - likely) / sure), 1.0)
        self._shares = np.concatenate((shares[:2, 0], hoped, shares[2:, 0]))
        chains, made = self._chains, self._counts[_MADE]
        nodes = self._nodes[chains:] + BORROWED * self._widths
        self._fill[chains:] = nodes / (made[chains:].sum(1) + BORROWED)

    def _of(self, counts: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Of counts [5, several, tables, levels]: shares [3, several, tables, levels] (P it goes on, stands, goes on in
        drafting), and of how many."""
        tried, offered, stood, could, made = counts
        won, of = np.stack((offered, stood, made)), np.stack((tried, offered, could)) + BORROWED
        chains = self._chains
        # p[i] = (won[i] + BORROWED p[i - 1]) / of[i], in closed form.
        borrowed = np.cumprod(BORROWED / of[:, :, :chains], 3)
        chain = borrowed * (self._first[:, None] + np.cumsum(won[:, :, :chains] / of[:, :, :chains] / borrowed, 3))
        tree = (won[:, :, chains:] + BORROWED * chain[:, :, self._chain_of]) / of[:, :, chains:]
        return np.minimum(np.concatenate((chain, tree), 2), 1.0), of  # but for rounding


@dataclass(frozen=True, slots=True)
class _Batch:
    """Whose problems run: what of it stays while the engine's batch is the same."""

    prompt_ids: Int64Array
    slots: Int64Array  # [R], or nobody's
    found: Int64Array = field(init=False)  # [slots], each once
    shares: Float64Array = field(init=False)  # [slots] of the requests

    def __post_init__(self) -> None:
        found, counts = np.unique(self.slots, return_counts=True)
        object.__setattr__(self, "found", found)
        object.__setattr__(self, "shares", counts / counts.sum())


def _first(drafter: str, accepts: Mapping[str, float]) -> tuple[float, float]:
    """P it has something to say, P that stands. A network always has."""
    entry = CATALOGUE.get(drafter)
    stands = accepts.get(drafter, 0.5 if entry is None else entry.accepts)
    return (1.0 if entry is not None and entry.is_network else 0.5), stands


def _drafted(outcome: StepOutcome) -> Int64Array:
    return np.zeros(outcome.load.running, np.int64) if outcome.reached is None else outcome.reached


def _stood(outcome: StepOutcome) -> Int64Array:
    return np.zeros(outcome.load.running, np.int64) if outcome.stood is None else outcome.stood


def _cap(depth: int, outcome: StepOutcome) -> Int64Array:
    """What a budget cut says nothing of what would have come after it."""
    drafted = _drafted(outcome)
    if outcome.room is None or len(outcome.room) != len(drafted):
        return np.full(len(drafted), depth)
    return np.maximum(np.minimum(outcome.room, depth), drafted)


def _prompts_of(outcome: StepOutcome) -> Int64Array:
    """The engine's array for the whole batch, where it is of those that drew."""
    whole, own = outcome.load.prompt_ids, outcome.prompt_ids
    return whole if own is None or len(own) == len(whole) else own
