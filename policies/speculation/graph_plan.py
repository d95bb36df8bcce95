"""The CUDA graphs that an engine captures, and the one that serves a step. Pure; owns no graph and no memory.

A graph is one static shape: a model (target or drafter), a number of requests, a number of packed rows. Context lengths
are not part of it. TLT 5.1, "Memory-Efficient CUDAGraph Capture": batch sizes come in buckets, larger ones with fewer
tokens to verify. Target and drafter are captured separately, since top-k affects only the drafter's shapes, and tokens
to verify only the target's. Equal shapes of different strategies are captured once. Mixed steps (decoding beside a
chunk of prompts) have graphs of a few sizes, up to where the device needs longer than the host without one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from config.catalogue import CATALOGUE
from config.strategy import Strategy

Kind = Literal["target", "drafter"]
LARGEST_CHUNK, LEAST_CHUNK = 1024, 64  # rows of prompts in the graphs of mixed steps
_MIXED_BUCKETS = 3  # one of so many buckets has graphs of mixed steps: padding is little beside a chunk
ArmsAt = Callable[[int], Iterable[Strategy]]  # running requests -> the strategies that may be chosen at that load


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GraphShape:
    """One static shape: at most `batch` requests with `rows` rows each on average, packed, none of them padded."""

    kind: Kind
    batch: int
    rows: int
    most: int = 0  # rows of one request; 0: `rows`
    tree: bool = False  # its rows come with a mask
    chunk: int = 0  # rows of prompts besides, from which nothing is drawn

    @property
    def drawn_rows(self) -> int:
        return self.batch * self.rows

    @property
    def total_rows(self) -> int:
        return self.drawn_rows + self.chunk

    @property
    def most_rows(self) -> int:
        return (self.most or self.rows) + self.chunk

    def holds(self, requests: int, drawn_rows: int, most: int, chunk: int = 0) -> bool:
        """Whether a step of `requests` requests, `drawn_rows` rows that are drawn from and `chunk` that are not, at
        most `most` of one request, fits."""
        fits = self.batch >= requests and self.drawn_rows >= drawn_rows and self.most_rows >= most
        return fits and self.chunk >= chunk


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Graphs to capture, the largest first (their memory then serves the smaller ones). The naive plan repeats equal
    shapes, once per strategy."""

    graphs: tuple[GraphShape, ...]
    drafts: tuple[tuple[int, Strategy], ...] = ()  # requests and strategy of a network drafter, the most requests first

    def graph_for(
        self, kind: Kind, requests: int, drawn_rows: int, most: int, *, tree: bool = False, chunk: int = 0
    ) -> GraphShape | None:
        """Return the captured graph for such a step with the fewest unused rows; None: eager."""
        alike = (g for g in self.of(kind) if g.tree == tree and (g.chunk > 0) == (chunk > 0))
        fitting = (g for g in alike if g.holds(requests, drawn_rows, most, chunk))
        return min(fitting, key=lambda graph: (graph.total_rows, graph.most_rows, graph.batch), default=None)

    @property
    def captures(self) -> int:
        """The number of graphs that our engine captures. A network drafter has its drafts, and one catch-up graph per
        bucket unless it shares the target's cache, where it has nothing to catch up with."""
        followed = {(batch, arm.drafter) for batch, arm in self.drafts if not CATALOGUE[arm.drafter].shares_cache}
        return len(self.of("target")) + len(self.drafts) + len(followed)

    @property
    def passes(self) -> int:
        """Passes over the whole target, or a copy of it, in all captured graphs: the measure of their nodes."""
        copied = sum(arm.depth - 1 for _, arm in self.drafts if CATALOGUE[arm.drafter].shares_cache)
        return self.captures + copied

    def of(self, kind: Kind) -> tuple[GraphShape, ...]:
        return tuple(graph for graph in self.graphs if graph.kind == kind)


def batch_buckets(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes worth a graph: 1, 2, 4, 8, 16, then two per doubling (24, 32, 48, 64 ...), and
    max_running. At most half as many rows again are computed in vain. Decoding there is bound by weights, not by rows.
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_running:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return (*(size for size in sizes if size < max_running), max_running)


def chunk_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Return the rows of prompts that mixed steps have graphs for, ascending by factors of two; chunk_tokens: the most
    of a step, 0 for none. Larger chunks run eagerly: a device needs longer for them than the host without a graph."""
    sizes = [min(chunk_tokens, LARGEST_CHUNK)]
    while sizes[-1] >= 2 * LEAST_CHUNK:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes)) if chunk_tokens else ()


def bucketed_plan(arms_at: ArmsAt, batches: Sequence[int], *, plain: bool = True, chunk_tokens: int = 0) -> CapturePlan:
    """Plan graphs for plain decoding (unless `plain` is false) at every bucket, and for the strategies of each bucket.

    batches ascend; bucket i serves batches[i - 1] + 1 .. batches[i] requests. `StrategyPolicy.arms_at` is an ArmsAt.
    Chains are ragged: rows between those of plain decoding and of the strategies are captured too (`_ragged`), and a
    graph takes any request that some strategy of its bucket may draft. chunk_tokens: the most rows of prompts of a
    step, for which mixed steps have graphs too, with one row of each request or the longest chain; 0: none.
    """
    mixed = batches[::-1][::_MIXED_BUCKETS] if plain else ()
    shapes: set[GraphShape] = set()
    drafts: set[tuple[int, Strategy]] = set()
    first = 1
    for batch in batches:
        arms = {arm for running in range(first, batch + 1) for arm in arms_at(running)}
        chains = {target_rows(arm) for arm in arms if not arm.is_tree} | ({1} if plain else set())
        longest = max(chains, default=0)
        for rows in _ragged(chains):
            shapes.add(GraphShape(kind="target", batch=batch, rows=rows, most=longest if 1 < rows < longest else 0))
        if batch in mixed:
            widths = {1, longest}
            shapes |= {
                GraphShape(kind="target", batch=batch, rows=rows, chunk=size)
                for rows in widths
                for size in chunk_sizes(chunk_tokens)
            }
        for arm in arms:
            if arm.is_tree:
                shapes.add(GraphShape(kind="target", batch=batch, rows=target_rows(arm), tree=True))
            if (level := drafter_rows(arm)) is not None:
                shapes.add(GraphShape(kind="drafter", batch=batch, rows=level))
                drafts.add((batch, arm))
        first = batch + 1
    ordered = sorted(drafts, key=lambda draft: (-draft[0] * draft[1].top_k, -draft[0], draft[1]))
    return CapturePlan(_largest_first(shapes), tuple(ordered))


def naive_plan(strategies: Iterable[Strategy], batches: Sequence[int]) -> CapturePlan:
    """Plan one capture per strategy and batch size, target and drafter together: the baseline of the bucketed plan."""
    return CapturePlan(
        _largest_first(shape for arm in strategies for batch in batches for shape in _shapes(arm, batch))
    )


def target_rows(strategy: Strategy) -> int:
    """Return the rows per request of a verification: the last known token and the drafted ones."""
    return 1 + strategy.tokens_to_verify


def drafter_rows(strategy: Strategy) -> int | None:
    """Return the rows per request of a drafting pass, one level of expansion; None if the drafter is no network."""
    entry = CATALOGUE.get(strategy.drafter)
    return strategy.top_k if entry is not None and entry.is_network else None


def _shapes(strategy: Strategy, batch: int) -> list[GraphShape]:
    shapes = [GraphShape(kind="target", batch=batch, rows=target_rows(strategy), tree=strategy.is_tree)]
    rows = drafter_rows(strategy)
    return shapes if rows is None else [*shapes, GraphShape(kind="drafter", batch=batch, rows=rows)]


def _ragged(chains: set[int]) -> list[int]:
    """Return `chains`, plus doublings between values a factor of three or more apart: 1, 9 -> 1, 2, 4, 9."""
    widths: list[int] = []
    for rows in sorted(chains):
        while widths and rows >= 3 * widths[-1]:
            widths.append(2 * widths[-1])
        widths.append(rows)
    return widths


def _largest_first(shapes: Iterable[GraphShape]) -> tuple[GraphShape, ...]:
    return tuple(sorted(shapes, key=lambda shape: (shape.kind != "target", -shape.total_rows, -shape.batch, shape)))
