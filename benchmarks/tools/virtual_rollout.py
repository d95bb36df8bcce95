"""Whole rollouts in virtual time: measured costs of passes, recorded drafts, drawn lengths. Owns the world; no policy.

A pass costs what a measured sweep says (benchmarks/tools/decode_sweep.py), interpolated over requests, rows and
context. What a drafter says, and what of it stands, is replayed: the suffix drafter's chains at every position of
recorded responses, each drafted for by its problem's others. A response that is longer than the recorded one goes
round. Lengths are drawn around each problem's own, with the spreads of the recorded ones, stretched; they grow over the
steps, as under RL. The same seed gives the same requests to every policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.tools.decode_sweep import Cell, Sweep
from benchmarks.tools.suffix_data import Problem
from benchmarks.tools.suffix_replay import suffixes
from policies.steps import Load

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

DEPTH = 24  # of the chains that are recorded
MIN_PROBABILITY, MATCH_FACTOR = 0.1, 2.0  # of the drafter, as by default
PROMPT_TOKENS = 200
DRAFT_S, DRAFT_REQUEST_S = 10e-6, 1e-6  # of the suffix drafter (docs/speculation_measured.md), far below a pass
GROUP = 8  # responses per problem and step


class SweepCosts:
    """Passes of a measured sweep. Between measurements linear in rows per request, requests and log context; beyond,
    as between the last two. Implements policies.speculation.length_aware.Costs."""

    def __init__(self, sweep: Sweep) -> None:
        self._batches = np.array(sweep.batches, np.float64)
        self._contexts = np.log2(np.array(sweep.contexts, np.float64))
        lengths = [0, *sorted({cell.length for cell in sweep.verification})]
        self._rows = np.array(lengths, np.float64) + 1  # per request
        table = np.full((len(sweep.batches), len(sweep.contexts), len(lengths)), np.nan)
        for i, batch in enumerate(sweep.batches):
            for j, context in enumerate(sweep.contexts):
                table[i, j, 0] = sweep.decoding.get((batch, context), np.nan)
                for k, length in enumerate(lengths[1:], 1):
                    table[i, j, k] = sweep.verification.get(Cell(batch, context, length), np.nan)
        for i, j, k in np.argwhere(np.isnan(table)):  # out of memory there: as the shorter context grows
            table[i, j, k] = table[i, j, k - 1] * table[i, j - 1, k] / table[i, j - 1, k - 1]
        self._table = np.maximum.accumulate(table, axis=2)  # more rows never take less: noise

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        """Seconds of a pass over `rows` rows of `requests` requests that know so many tokens in all."""
        i, along = _between(self._batches, requests)
        j, deep = _between(self._contexts, float(np.log2(max(context_tokens / requests, 1))))
        k, wide = _between(self._rows, rows / requests)
        corner = self._table[i : i + 2, j : j + 2, k : k + 2]
        by_rows = corner[..., 0] * (1 - wide) + corner[..., 1] * wide
        by_context = by_rows[:, 0] * (1 - deep) + by_rows[:, 1] * deep
        return float(by_context[0] * (1 - along) + by_context[1] * along)

    def passes(self) -> tuple[FloatArray, FloatArray]:
        """(rows, seconds) of all measured passes."""
        rows = np.broadcast_to(self._batches[:, None, None] * self._rows, self._table.shape)
        return rows.ravel().astype(np.float64), self._table.ravel()


def _between(known: FloatArray, value: float) -> tuple[int, float]:
    at = min(max(int(np.searchsorted(known, value)) - 1, 0), len(known) - 2)
    share = (value - known[at]) / (known[at + 1] - known[at])
    return at, max(float(share), 0.0)


@dataclass(frozen=True, slots=True)
class Replays:
    """Responses of problems, and at each of their positions how deep the drafter went and how deep that stood."""

    offered: Int64Array  # [T], all responses one behind the other
    stood: Int64Array  # [T]
    starts: Int64Array  # [problems, samples]
    lengths: Int64Array  # [problems, samples]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "Replays":
        samples = min(len(problem.samples) for problem in problems)
        offered, stood = [], []
        for problem in problems:
            for held_out in range(samples):
                found = _replay(problem, held_out)
                offered.append(found[0])
                stood.append(found[1])
        lengths = np.array([len(texts) for texts in offered], np.int64)
        starts = np.concatenate([[0], lengths.cumsum()[:-1]])
        shape = (len(problems), samples)
        return cls(np.concatenate(offered), np.concatenate(stood), starts.reshape(shape), lengths.reshape(shape))

    def spreads(self) -> tuple[float, float]:
        """Standard deviations of log-length: between problems, within one."""
        logs = np.log(self.lengths)
        return float(logs.mean(1).std()), float(logs.std(axis=1, ddof=1).mean())

    def survival(self, pool_tokens: float = 500.0) -> tuple[FloatArray, FloatArray]:
        """(drafted to depth j, accepted to depth j), each [problems + 1, DEPTH]: of every problem, shrunk to the pool
        by so many positions of it, and of the pool, the last."""
        depths = np.arange(1, DEPTH + 1)
        firsts, positions = self.starts[:, 0], self.lengths.sum(1)[:, None]
        found = []
        for values in (self.offered, self.stood):
            sums = np.add.reduceat((values[:, None] >= depths).astype(np.int64), firsts, axis=0)
            pool = sums.sum(0) / len(values)
            found.append(np.concatenate([(sums + pool_tokens * pool) / (positions + pool_tokens), pool[None]]))
        return found[0], found[1]


def _replay(problem: Problem, held_out: int) -> tuple[Int64Array, Int64Array]:
    index, text = suffixes(1), problem.samples[held_out]
    for number, sample in enumerate(problem.samples):
        if number != held_out:
            index.publish(problem.prompt, sample, 0)
    index.begin(0, problem.prompt)
    index.flush()
    offered, stood = np.zeros(len(text), np.int64), np.zeros(len(text), np.int64)
    tokens, parents = np.empty((1, DEPTH), np.int64), np.empty((1, DEPTH), np.int64)
    probabilities, counts = np.empty((1, DEPTH), np.float32), np.empty(1, np.int64)
    handle, most, one = np.array([0]), np.array([DEPTH]), np.array([0, 1])
    for at in range(len(text)):
        if at:
            index.append_batch(handle, text[at - 1 : at], one)
        index.draft_batch(handle, most, DEPTH, 1, MIN_PROBABILITY, MATCH_FACTOR, tokens, parents, probabilities, counts)
        offered[at] = counts[0]
        known = min(int(counts[0]), len(text) - at)
        same = tokens[0, :known] == text[at : at + known]
        stood[at] = known if same.all() else int(np.argmin(same))
    return offered, stood


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal, capped."""

    median: float
    cap: int
    between: float  # spread of log-length between problems
    within: float
    growth: float = 1.5  # of all lengths, from the first step to the last


@dataclass(frozen=True, slots=True)
class Requests:
    """Of one step; all [B]."""

    problems: Int64Array
    starts: Int64Array  # of its text in the replays
    periods: Int64Array  # its length there
    shifts: Int64Array
    lengths: Int64Array


def draw(replays: Replays, lengths: Lengths, step: int, steps: int, count: int) -> Requests:
    """Groups of problems that all take their turn."""
    rng = np.random.default_rng((7, step))
    problems, samples = replays.starts.shape
    groups = max(count // GROUP, 1)
    per_epoch = max(problems // groups, 1)
    order = np.random.default_rng((8, step // per_epoch)).permutation(problems)
    first = step % per_epoch * groups
    chosen: Int64Array = np.repeat(np.resize(order[first : first + groups], groups), count // groups)
    sample = rng.integers(0, samples, count)
    of_problem = lengths.between * np.random.default_rng(9).standard_normal(problems)
    own: FloatArray = np.log(lengths.median) + np.take(of_problem, chosen)
    grown = lengths.growth ** (step / max(steps - 1, 1) - 0.5)
    drawn = np.exp(own + lengths.within * rng.standard_normal(count)) * grown
    return Requests(
        chosen,
        replays.starts[chosen, sample],
        replays.lengths[chosen, sample],
        rng.integers(0, 1 << 20, count),
        np.clip(drawn, 16, lengths.cap).astype(np.int64),
    )


class Divides(Protocol):
    """A policy in virtual time."""

    def begin(self, request: int, slot: int, requests: Requests) -> None: ...
    def end(self, slot: int, drawn: int, cap: int) -> None: ...
    def new_step(self, requests: Requests) -> None: ...
    def depths(self, load: Load, slots: Int64Array, drawn: Int64Array, cap: int) -> Int64Array | None:
        """[R]; None: plain decoding."""


@dataclass(slots=True)
class Rollout:
    seconds: float = 0.0
    passes: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    linear_s: float = 0.0  # by eq. (1)
    tokens: int = field(default=0)


def rollout(
    replays: Replays,
    requests: Requests,
    costs: SweepCosts,
    policy: Divides,
    *,
    cap: int,
    slots: int,
    linear: tuple[float, float] = (0.0, 0.0),
) -> Rollout:
    """Decode them all, at most `slots` at once, the first first."""
    count = len(requests.lengths)
    found = Rollout(tokens=int(requests.lengths.sum()))
    policy.new_step(requests)
    running = np.arange(min(count, slots))
    place = running.copy()  # slot of each
    following = len(running)
    for request, slot in zip(running.tolist(), place.tolist(), strict=True):
        policy.begin(request, slot, requests)
    drawn = np.zeros(count, np.int64)
    prompt_ids = requests.problems[running]
    while len(running):
        had = drawn[running]
        context = int(had.sum()) + PROMPT_TOKENS * len(running)
        load = Load(len(running), count - following, context, prompt_ids)
        depths = policy.depths(load, place, had, cap)
        rows = len(running)
        if depths is None:
            gained = np.ones(rows, np.int64)
        else:
            at = requests.starts[running] + (requests.shifts[running] + had) % requests.periods[running]
            drafts = np.minimum(replays.offered[at], depths)
            stood = np.minimum(np.minimum(replays.stood[at], drafts), requests.lengths[running] - had - 1)
            rows += int(drafts.sum())
            gained = 1 + stood
            found.drafted += int(drafts.sum())
            found.accepted += int(stood.sum())
            found.seconds += DRAFT_S + DRAFT_REQUEST_S * len(running)
        found.seconds += costs.step_s(len(running), rows, context)
        found.linear_s += linear[0] + linear[1] * rows
        found.passes += 1
        found.rows += rows
        drawn[running] = had + gained
        ended = drawn[running] >= requests.lengths[running]
        if ended.any():
            free = place[ended].tolist()
            for slot, request in zip(free, running[ended].tolist(), strict=True):
                policy.end(slot, int(requests.lengths[request]), cap)
            running, place = running[~ended], place[~ended]
            fresh = np.arange(following, min(following + len(free), count))
            following += len(fresh)
            if len(fresh):
                taken = np.array(free[: len(fresh)], np.int64)
                for request, slot in zip(fresh.tolist(), taken.tolist(), strict=True):
                    policy.begin(request, slot, requests)
                running, place = np.concatenate([running, fresh]), np.concatenate([place, taken])
            prompt_ids = requests.problems[running]
    return found


def plain_s(requests: Requests, costs: SweepCosts, *, slots: int) -> float:
    """Seconds without drafts, in closed form between the ends of responses."""
    left = requests.lengths.astype(np.int64).tolist()
    running, queue = [[tokens, 0] for tokens in left[:slots]], left[slots:]
    seconds = 0.0
    while running:
        nearest = min(tokens - had for tokens, had in running)
        size = len(running)
        context = sum(had for _, had in running) + PROMPT_TOKENS * size
        ends = [costs.step_s(size, size, context + size * at) for at in (0, nearest / 2, nearest)]
        seconds += nearest * (ends[0] + 4 * ends[1] + ends[2]) / 6
        running = [[tokens, had + nearest] for tokens, had in running if tokens - had > nearest]
        while queue and len(running) < slots:
            running.append([queue.pop(0), 0])
    return seconds
