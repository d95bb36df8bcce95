"""Which CUDA graphs an engine captures, and which one serves a step. Pure; owns no graph and no memory.

A graph is one static shape: a model (target or drafter), a number of requests, rows per request. TLT 5.1, "Memory-
Efficient CUDAGraph Capture": batch sizes in buckets, larger ones with fewer tokens to verify; target and drafter
captured apart, since top-k shapes only what the drafter computes and tokens to verify only what the target does; equal
shapes of different strategies captured once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.speculation.catalogue import CATALOGUE
from policies.speculation.strategy import Strategy

Kind = Literal["target", "drafter"]
ArmsAt = Callable[[int], Iterable[Strategy]]  # running requests -> the strategies that may be chosen then


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """One static shape: `batch` requests of `rows` rows each."""

    kind: Kind
    batch: int
    rows: int

    @property
    def total_rows(self) -> int:
        return self.batch * self.rows


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Graphs to capture, the largest first (their memory then serves the smaller ones). The naive plan repeats equal
    shapes, once for each strategy."""

    graphs: tuple[GraphShape, ...]

    def graph_for(self, kind: Kind, batch: int, rows: int) -> GraphShape | None:
        """The captured graph that holds `batch` requests of at most `rows` rows with the least padding; None: eager."""
        fitting = (graph for graph in self.graphs if graph.kind == kind and graph.batch >= batch and graph.rows >= rows)
        return min(fitting, key=lambda graph: (graph.total_rows, graph.batch), default=None)

    def of(self, kind: Kind) -> tuple[GraphShape, ...]:
        return tuple(graph for graph in self.graphs if graph.kind == kind)


def batch_buckets(max_running: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, 16, then two per doubling (24, 32, 48, 64 ...), and max_running itself.

    At most half as many requests again are computed as padding; decoding is bound by weights there, not by rows.
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_running:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return (*(size for size in sizes if size < max_running), max_running)


def context_buckets(max_tokens: int, block_tokens: int, smallest: int = 256) -> tuple[int, ...]:
    """Context lengths that a graph is captured for: attention without a kernel of its own reads so many tokens of every
    request, used or not. Doublings from `smallest` up to max_tokens, in whole blocks."""
    longest = -(-max_tokens // block_tokens) * block_tokens
    sizes, size = [], -(-smallest // block_tokens) * block_tokens
    while size < longest:
        sizes.append(size)
        size *= 2
    return (*sizes, longest)


def bucketed_plan(arms_at: ArmsAt, batches: Sequence[int], *, plain: bool = True) -> CapturePlan:
    """Plain decoding (unless not asked for) at every bucket, and what the strategies need that may be chosen there.

    batches ascend; bucket i serves batches[i - 1] + 1 .. batches[i] requests. `StrategyPolicy.arms_at` is an ArmsAt.
    """
    shapes: set[GraphShape] = set()
    first = 1
    for batch in batches:
        if plain:
            shapes.add(GraphShape("target", batch, 1))
        for running in range(first, batch + 1):
            for strategy in arms_at(running):
                shapes.update(_shapes(strategy, batch))
        first = batch + 1
    return CapturePlan(_largest_first(shapes))


def naive_plan(strategies: Iterable[Strategy], batches: Sequence[int]) -> CapturePlan:
    """One capture per strategy and batch size, target and drafter together: what the bucketed plan is compared with."""
    shapes = [shape for strategy in strategies for batch in batches for shape in _shapes(strategy, batch)]
    return CapturePlan(_largest_first(shapes))


def target_rows(strategy: Strategy) -> int:
    """Rows per request of a verification: the last known token and the drafted ones."""
    return 1 + strategy.tokens_to_verify


def drafter_rows(strategy: Strategy) -> int | None:
    """Rows per request of a drafting pass, one level of expansion; None: the drafter is no network."""
    entry = CATALOGUE.get(strategy.drafter)
    return strategy.top_k if entry is not None and entry.is_network else None


def _shapes(strategy: Strategy, batch: int) -> list[GraphShape]:
    shapes = [GraphShape("target", batch, target_rows(strategy))]
    rows = drafter_rows(strategy)
    return shapes if rows is None else [*shapes, GraphShape("drafter", batch, rows)]


def _largest_first(shapes: Iterable[GraphShape]) -> tuple[GraphShape, ...]:
    return tuple(sorted(shapes, key=lambda shape: (shape.kind != "target", -shape.total_rows, -shape.batch)))
