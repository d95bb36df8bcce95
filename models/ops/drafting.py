"""Operations for drafting only, in plain torch: the oracle of its operators. Drafter inputs, and growing trees.

A tree's nodes are numbered level by level: first the C of level 0, then k children of each of the k expanded nodes. No
shape depends on values, so nothing synchronises.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import reference

Fed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    features: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """[embedding of tokens | features], each normed if it has a weight: int64 [T], [V, H], [T, H] -> [T, 2H]."""
    embedded = F.embedding(tokens, embedding)
    if token_norm is not None:
        embedded = reference.rms_norm(embedded, token_norm, eps)
    if feature_norm is not None:
        features = reference.rms_norm(features, feature_norm, eps)
    return torch.cat((embedded, features), dim=-1)


def tree_feed(
    drawn: Tensor,
    logprobs: Tensor,
    newest: Tensor | None,
    paths: Tensor | None,
    first: int,
    k: int,
    outputs: Tensor,
    fed_tokens: Tensor,
    fed_hidden: Tensor,
    fed_mask: Tensor,
    node_tokens: Tensor,
    node_parents: Tensor,
    node_scores: Tensor,
) -> Fed:
    """Store a newly drawn level's nodes, and append the k best as rows behind the F rows fed before. Ties go to the
    smaller node.

    drawn int64, logprobs float32: C candidates per request, children of the root [R, k] or of the expanded nodes [R *
    k, k]. newest int64, paths float32 [R, k]: those nodes and the log-probabilities of their paths (None: the root's).
    first: the number of the level's first node. outputs [R, F, H]: features behind the rows fed before; for the root
    [R, 1, H]. fed_tokens int64 [R, F], fed_hidden [R, F, H], fed_mask uint8 [R, F, F]: the rows fed before.
    node_tokens, node_parents int64, node_scores float32 [R, N]: written from `first` on.

    Returns tokens [R, F + k], the features behind their parents [R, F + k, H], and the mask of visible rows, uint8 [R,
    F + k, F + k]. Also returns the k nodes with their paths, like `newest` and `paths`.
    """
    requests, fed = fed_tokens.shape
    tokens, parents, scores = _level(drawn, logprobs, newest, paths, requests)
    end = first + tokens.shape[1]
    node_tokens[:, first:end], node_parents[:, first:end], node_scores[:, first:end] = tokens, parents, scores
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    above = (best // k + (fed - k) if fed else torch.zeros_like(best))[:, :, None]
    hidden = outputs.gather(1, above.expand(-1, -1, outputs.shape[2]))
    mask = fed_mask.new_zeros(requests, fed + k, fed + k)
    mask[:, :fed, :fed] = fed_mask
    if fed:
        mask[:, fed:, :fed] = fed_mask.gather(1, above.expand(-1, -1, fed))
    mask[:, fed:, fed:].diagonal(dim1=1, dim2=2).fill_(1)
    return (
        torch.cat((fed_tokens, tokens.gather(1, best)), dim=1),
        torch.cat((fed_hidden, hidden), dim=1),
        mask,
        best + first,
        scores.gather(1, best),
    )


def tree_best(
    drawn: Tensor,
    logprobs: Tensor,
    newest: Tensor | None,
    paths: Tensor | None,
    first: int,
    node_tokens: Tensor,
    node_parents: Tensor,
    node_scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
) -> None:
    """Select the best nodes of all levels once the last is drawn (arguments as in `tree_feed`), most probable first.

    Writes tokens and parents int64 (-1: the root) and scores float32, [R, count]. Nodes of score -inf are invalid."""
    requests, count = tokens.shape
    last = _level(drawn, logprobs, newest, paths, requests)
    every = (node_tokens, node_parents, node_scores)
    all_tokens, all_parents, all_scores = (
        torch.cat((known[:, :first], level), dim=1) for known, level in zip(every, last, strict=True)
    )
    total = all_tokens.shape[1]
    best = all_scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    place = best.new_full((requests, total + 1), -1)  # the last column is the root's
    place.scatter_(1, best, torch.arange(count, device=best.device).expand(requests, -1))
    tokens.copy_(all_tokens.gather(1, best))
    parents.copy_(place.gather(1, all_parents.gather(1, best) % (total + 1)))
    scores.copy_(all_scores.gather(1, best))


def _level(
    drawn: Tensor, logprobs: Tensor, newest: Tensor | None, paths: Tensor | None, requests: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and path scores of a level's nodes, [R, C]."""
    tokens = drawn.view(requests, -1)
    if newest is None or paths is None:
        return tokens, torch.full_like(tokens, -1), logprobs.view(requests, -1)
    each = tokens.shape[1] // newest.shape[1]
    scores = logprobs.view(requests, -1, each) + paths[:, :, None]
    return tokens, newest.repeat_interleave(each, dim=1), scores.view(requests, -1)
