"""The number of accepted draft tokens, by depth, learned from every verification. Owns no cost and no choice.

A drafter's chains share one table; each of its trees has its own. Per depth it counts how often a draft accepted so far
continues, and how often its next token is accepted. So a drafter with short drafts does not look like a wrong one. A
level borrows from the one above it, the first from a prior of the drafter's kind, a tree's from the chain's, and a
problem's from the pool's. So untried levels are extrapolated, and rarely tried ones are shrunk.
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

BORROWED = 4.0  # request-steps: the weight of borrowed evidence
HOPED = 2.0  # standard errors by which an optimistic estimate exceeds the mean
MEMORY = 512.0  # request-steps of its own after which a table's counts have half the weight, to follow change
DOUBT = 1024.0  # engine steps without use after which they do too, since an old loser may have become better
RENEWED = 32.0  # request-steps kept from older weights, since new weights differ little from them
PROBLEMS = 1024  # number of remembered problems; the least recently seen is dropped

# Counts, per level: drafts that could have continued to it, did, were accepted there; in drafting: could have, did.
_TRIED, _OFFERED, _STOOD, _COULD, _MADE = range(5)


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectations per request and step, [arms], in the order of the arms."""

    accepted: Float64Array
    hoped: Float64Array  # accepted, optimistically
    rows: Float64Array  # drafted nodes that the target verifies


class AcceptanceModel:
    """Acceptance of the drafters that `arms` name. Deterministic; learning from a hold takes some tens of
    microseconds."""

    def __init__(self, arms: Sequence[Strategy], accepts: Mapping[str, float] | None = None) -> None:
        """accepts: by drafter, the prior share of its tokens that is accepted."""
        arms = [arm for arm in arms if arm.depth]
        drafters = list(dict.fromkeys(arm.drafter for arm in arms))
        trees = list(dict.fromkeys(arm for arm in arms if arm.is_tree))
        chains = {name: table for table, name in enumerate(drafters)}
        # A drafter's chains share one, also that of a tree, which is drafted beside early text. Each tree has its own.
        self._table = {one: chains[arm.drafter] for arm in arms for one in (arm, arm.chain)}
        self._table |= {tree: len(drafters) + i for i, tree in enumerate(trees)}
        self._chains = len(drafters)
        self._chain_of = np.array([chains[tree.drafter] for tree in trees], np.int64)  # [trees] tables
        width = max((arm.depth for arm in arms), default=1)
        tables = max(len(drafters) + len(trees), 1)
        self._at = np.array([self._table[arm] for arm in arms], np.int64), np.array([a.depth for a in arms], np.int64)
        # Prior P that a draft continues, that its token is accepted, that drafting continues.
        first = [_first(name, accepts or {}) for name in drafters] or [(0.5, 0.5)]
        self._first = np.array([(on, stands, on) for on, stands in first]).T[:, :, None]  # [3, chains, 1]
        self._counts = np.zeros((5, tables, width))
        self._shares = np.zeros(
            (5, tables, width)
        )  # estimated P: it continues, is accepted; both optimistic; drafting continues
        self._nodes = np.zeros(tables)  # drafted
        self._widths = np.array([tree.tokens_to_verify / tree.depth for tree in trees])  # prior nodes per level
        self._fill = np.ones(tables)  # nodes per level, as drafted
        self._fresh = np.zeros(tables)  # request-steps since the drafter's texts last grew
        self._clock = 0.0  # engine steps
        self._stale = True  # the shares are out of date
        self._slots: dict[int, int] = {}  # by problem, the least recently seen first; slot 0 is for no problem
        self._seen = np.zeros(1 + PROBLEMS)  # clock
        self._problems = np.zeros((tables, 1 + PROBLEMS, 5, width), np.float32)  # counts
        self._batch = _Batch(NO_REQUESTS, np.zeros(1, np.int64))

    def seen(self, strategy: Strategy) -> float:
        """Return the effective number of request-steps in its table."""
        return float(self._counts[_COULD, self._table[strategy], 0])

    def learn(self, strategy: Strategy, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from steps of this strategy. Those without drafts count as cases in which it had none to offer."""
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
        """Note engine steps of that table's strategies, or plain ones. The weight of all other tables falls."""
        self._clock += steps
        keep = np.full(len(self._nodes), 0.5 ** (steps / DOUBT))
        if drafting is not None:
            keep[drafting] = 1.0
        self._counts *= keep[:, None]
        self._nodes *= keep
        self._stale = True

    def renewed(self, drafter: str) -> None:
        """Note new weights: the old counts become a weak prior."""
        for table in {table for arm, table in self._table.items() if arm.drafter == drafter}:
            keep = min(1.0, RENEWED / max(self._counts[_COULD, table, 0], 1e-9))
            self._counts[:, table] *= keep
            self._nodes[table] *= keep
            self._problems[table] *= keep
        self._stale = True

    def grown(self, drafter: str) -> None:
        """Note that the drafter has more texts. The old counts stay the expectation, but do not limit optimism. So a
        drafter tried when it knew nothing is tried again."""
        for table in {table for arm, table in self._table.items() if arm.drafter == drafter}:
            self._fresh[table] = 0.0
        self._stale = True

    def expected(self, prompt_ids: Int64Array) -> Expected:
        """Return the mean over these requests; if empty, over the pool."""
        batch = self._batch_of(prompt_ids)
        means = np.matmul(batch.shares, self._lives(slice(None), batch.found)).cumsum(2)
        tables, depths = self._at
        accepted, hoped, rows = means[:, tables, depths - 1]
        return Expected(accepted, hoped, rows * self._fill[tables])

    def survival(self, strategy: Strategy, prompt_ids: Int64Array) -> tuple[Float64Array, Float64Array]:
        """Return (drafted to depth j, accepted to depth j), each [R, strategy.depth], without any budget's cut."""
        table = self._table[strategy]
        lives = self._lives(slice(table, table + 1), self._batch_of(prompt_ids).slots)[:, 0, :, : strategy.depth]
        return lives[2], lives[0]

    def _lives(self, tables: slice, slots: Int64Array) -> Float64Array:
        """Return [3, tables, slots, levels]: P that a draft is accepted up to the level, optimistically, and is drafted
        to it."""
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
        """Return the batch, cached by its array: engines pass the same array while the batch is the same."""
        if self._stale:
            self._estimate()
        if prompt_ids is not self._batch.prompt_ids:
            slots = [self._slot(prompt) for prompt in prompt_ids.tolist()] or [0]
            self._batch = _Batch(prompt_ids, np.array(slots, np.int64))
        return self._batch

    def _count(self, table: int, prompt_ids: Int64Array, levels: Int64Array) -> Float64Array:
        """Count `levels`, [5, steps * R], the level reached per kind of count. Adds to the problems and returns the
        sum."""
        width = self._counts.shape[2] + 1
        known = len(prompt_ids) and levels.shape[1] % len(prompt_ids) == 0  # otherwise the problems are unknown
        batch = self._batch_of(prompt_ids) if known else None
        slots = np.zeros(1, np.int64) if batch is None else batch.slots
        which = np.arange(levels.shape[1]) % len(slots)
        found = np.bincount(
            ((which * 5 + np.arange(5)[:, None]) * width + levels).ravel(), minlength=len(slots) * 5 * width
        ).reshape(-1, 5, width)
        counts = found[:, :, ::-1].cumsum(2)[:, :, -2::-1].astype(np.float64)
        if batch is not None:
            each = batch.found
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
        """Estimate all shares. Every level borrows from the one above it, or a tree's from the chain's."""
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
    """The problems of an engine's batch, kept while the batch is the same."""

    prompt_ids: Int64Array
    slots: Int64Array  # [R]; 0 for no problem
    found: Int64Array = field(init=False)  # [slots], each once
    shares: Float64Array = field(init=False)  # [slots] of the requests

    def __post_init__(self) -> None:
        found, counts = np.unique(self.slots, return_counts=True)
        object.__setattr__(self, "found", found)
        object.__setattr__(self, "shares", counts / counts.sum())


def _first(drafter: str, accepts: Mapping[str, float]) -> tuple[float, float]:
    """Return the prior P that it drafts at all, and that a token is accepted. A network always drafts."""
    entry = CATALOGUE.get(drafter)
    stands = accepts.get(drafter, 0.5 if entry is None else entry.accepts)
    return (1.0 if entry is not None and entry.is_network else 0.5), stands


def _drafted(outcome: StepOutcome) -> Int64Array:
    return np.zeros(outcome.load.running, np.int64) if outcome.reached is None else outcome.reached


def _stood(outcome: StepOutcome) -> Int64Array:
    return np.zeros(outcome.load.running, np.int64) if outcome.stood is None else outcome.stood


def _cap(depth: int, outcome: StepOutcome) -> Int64Array:
    """Return the depth that each draft could reach: a budget's cut leaves the rest unknown."""
    drafted = _drafted(outcome)
    if outcome.room is None or len(outcome.room) != len(drafted):
        return np.full(len(drafted), depth)
    return np.maximum(np.minimum(outcome.room, depth), drafted)


def _prompts_of(outcome: StepOutcome) -> Int64Array:
    """Return the engine's array for the whole batch, if it covers the requests that drew."""
    whole, own = outcome.load.prompt_ids, outcome.prompt_ids
    return whole if own is None or len(own) == len(whole) else own
