"""The shape of a draft on a device, independent of its values: levels, rows per level, the request of each row.

Pure numpy; owns no memory. One shape is one captured graph: the size of each array is the same for all requests.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A draft of `levels` draws for up to `requests` requests: a chain (k = 1), or a tree in which k nodes of each
    level are expanded. Level 0 draws from the caught-up state; every further level is a pass of the drafter."""

    requests: int
    levels: int
    k: int
    nodes: int  # returned per request

    @classmethod
    def of(cls, strategy: Strategy, requests: int, vocab: int, most_fed: int) -> "DraftShape":
        """most_fed: drafted rows of a request for which the cache has room."""
        if not strategy.is_tree:
            levels = min(strategy.depth, most_fed + 1)  # the last token is not fed
            return cls(requests, levels, 1, levels)
        k = min(strategy.top_k, vocab)
        tree = cls(requests, min(strategy.depth, most_fed // k + 1), k, 0)
        return replace(tree, nodes=min(strategy.tokens_to_verify, tree.all_candidates))

    def candidates(self, level: int) -> int:
        """Return the tree nodes that a level adds, per request."""
        return self.k if level == 0 else self.k * self.k

    @property
    def all_candidates(self) -> int:
        return sum(self.candidates(level) for level in range(self.levels))

    def fed(self, level: int) -> int:
        """Return the rows per request of the pass before the draws of `level` >= 1. A tree feeds all of its
        rows again."""
        return 1 if self.k == 1 else level * self.k

    def rows(self, level: int) -> slice:
        """Return the slice of that pass's rows, within those of all levels."""
        before = sum(self.fed(each) for each in range(1, level))
        return slice(self.requests * before, self.requests * (before + self.fed(level)))

    def draws(self, level: int) -> slice:
        """Return the slice of a level's draws, within those of all levels."""
        if level == 0:
            return slice(0, self.requests)
        start = self.requests * (1 + (level - 1) * self.k)
        return slice(start, start + self.requests * self.k)

    @property
    def all_rows(self) -> int:
        return self.requests * sum(self.fed(level) for level in range(1, self.levels))

    @property
    def all_draws(self) -> int:
        return self.requests * (1 + (self.levels - 1) * self.k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Belonging:
    """The request of each row and draw of a shape; `present` stands for none."""

    row_request: Int64Array  # [all_rows]
    row_real: BoolArray
    row_place: Int64Array  # distance of its K/V's place from the first drafted row's
    row_depth: Int64Array  # depth of its token in the draft, from 1; 0 without one
    draw_request: Int64Array  # [all_draws]
    draw_level: Int64Array
    level_offsets: NDArray[np.int32]  # [levels - 1, requests + 1], rows of each request in each pass
    level_ends: NDArray[np.int32]  # [levels - 1, 1], places filled by each pass


@lru_cache(maxsize=4096)
def belonging(shape: DraftShape, present: int) -> Belonging:
    """Return it for `present` of the shape's requests. Rows of a pass are packed, with padding after them."""
    requests, k = shape.requests, shape.k
    row_request, row_place, row_depth, offsets, ends = [], [], [], [], []
    for level in range(1, shape.levels):
        fed = shape.fed(level)
        row_request.append(np.minimum(np.arange(requests), present).repeat(fed))
        place = np.full(1, level - 1) if k == 1 else np.arange(fed)
        row_place.append(np.tile(place, requests))
        row_depth.append(np.tile(np.full(1, level) if k == 1 else place // k + 1, requests))
        offsets.append(np.minimum(np.arange(requests + 1), present) * fed)
        ends.append(place[-1] + 1)
    draw_request, draw_level = [np.minimum(np.arange(requests), present)], [np.zeros(requests, np.int64)]
    for level in range(1, shape.levels):
        draw_request.append(draw_request[0].repeat(k))
        draw_level.append(np.full(requests * k, level))
    rows = _joined(row_request)
    real = rows < present
    return Belonging(
        row_request=rows,
        row_real=real,
        row_place=_joined(row_place),
        row_depth=np.where(real, _joined(row_depth), 0),
        draw_request=_joined(draw_request),
        draw_level=_joined(draw_level),
        level_offsets=np.array(offsets, np.int32).reshape(len(offsets), requests + 1),
        level_ends=np.array(ends, np.int32).reshape(len(ends), 1),
    )


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
