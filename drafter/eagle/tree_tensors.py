"""`drafter.eagle.tree` on a device: the same trees in tensors of fixed sizes, without a wait for the host.

Pure functions of tensors; what is not known before a draft (which node is best) never decides a shape. Equal to the
array functions node for node, ties included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Level:
    """The candidates of one level, C per request."""

    tokens: Tensor  # int64 [R, C]
    parents: Tensor  # int64 [R, C], nodes of the level before, counted over all levels; -1: the root
    scores: Tensor  # float32 [R, C], log-probability of the path; -inf: not a candidate


@dataclass(frozen=True, slots=True)
class Fed:
    """The F rows per request that the next pass takes."""

    tokens: Tensor  # int64 [R, F]
    hidden: Tensor  # [R, F, H], features behind each row's parent
    mask: Tensor  # uint8 [R, F, F], which rows each row sees
    newest: Tensor  # int64 [R, k], the nodes that the last k rows are
    scores: Tensor  # float32 [R, k], of their paths


def grown(level: Level, first: int, k: int, before: Fed | None, outputs: Tensor) -> Fed:
    """Feed the k best nodes of `level` behind the rows fed before. first: the index of the level's first node.

    outputs [R, F, H]: what the pass over the rows of `before` put out; [R, 1, H]: what catching up did.
    """
    best = level.scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    tokens, scores = level.tokens.gather(1, best), level.scores.gather(1, best)
    own = torch.ones(k, device=best.device, dtype=torch.uint8).diag().expand(len(best), k, k)
    if before is None:
        # The children of the root follow the last known token, whose features all of them take.
        return Fed(tokens, outputs.expand(-1, k, -1), own, best + first, scores)
    fed = before.tokens.shape[1]
    parents = (best // k + (fed - k))[:, :, None]
    hidden = outputs.gather(1, parents.expand(-1, -1, outputs.shape[2]))
    inherited = before.mask.gather(1, parents.expand(-1, -1, fed))
    mask = torch.nn.functional.pad(before.mask, (0, k))
    mask = torch.cat((mask, torch.cat((inherited, own), dim=2)), dim=1)
    return Fed(
        torch.cat((before.tokens, tokens), dim=1), torch.cat((before.hidden, hidden), dim=1), mask, best + first, scores
    )


def children(tokens: Tensor, logprobs: Tensor, fed: Fed) -> Level:
    """What was drawn behind the newest rows, both [R * k, k], as the next level."""
    requests, k = fed.scores.shape
    scores = logprobs.view(requests, k, k) + fed.scores[:, :, None]
    parents = fed.newest[:, :, None].expand(-1, -1, k)
    return Level(tokens.view(requests, k * k), parents.reshape(requests, k * k), scores.view(requests, k * k))


def best_of(levels: list[Level], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best `count` nodes of each request, most probable first: tokens, parents int64 and scores float32, all
    [R, count]. Those without a finite score are no candidates."""
    tokens, parents, scores = (
        torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("tokens", "parents", "scores")
    )
    requests, total = scores.shape
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    place = parents.new_full((requests, total + 1), -1)  # the last column is the root's
    place.scatter_(1, best, torch.arange(best.shape[1], device=best.device).expand(requests, -1))
    above = place.gather(1, parents.gather(1, best) % (total + 1))
    return tokens.gather(1, best), above, scores.gather(1, best)
