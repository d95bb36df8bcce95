"""Operators of drafting among `paceline::*`: schema, CPU (the oracle), meta (shapes), CUDA (one kernel each).

The rules of `operators` apply; `models.ops.drafting` defines each.
"""

from typing import Any

import torch
from torch import Tensor

from models.ops import drafting
from models.ops.drafting import Fed
from models.ops.triton.operators import launched

_SCHEMAS = (
    "draft_inputs(Tensor tokens, Tensor embedding, Tensor features, Tensor? token_norm, Tensor? feature_norm,"
    " float eps) -> Tensor",
    "tree_feed(Tensor drawn, Tensor logprobs, Tensor? newest, Tensor? paths, int first, int k, Tensor outputs,"
    " Tensor fed_tokens, Tensor fed_hidden, Tensor fed_mask, Tensor(a!) node_tokens, Tensor(b!) node_parents,"
    " Tensor(c!) node_scores) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "tree_best(Tensor drawn, Tensor logprobs, Tensor? newest, Tensor? paths, int first, Tensor node_tokens,"
    " Tensor node_parents, Tensor node_scores, Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) scores) -> ()",
)


def _meta_draft_inputs(tokens: Tensor, embedding: Tensor, features: Tensor, *rest: Any) -> Tensor:
    return features.new_empty(features.shape[0], 2 * features.shape[1])


def empty_fed(k: int, outputs: Tensor, fed_tokens: Tensor) -> Fed:
    """Return uninitialised outputs of `tree_feed`."""
    requests, fed = fed_tokens.shape
    rows = fed + k
    return (
        fed_tokens.new_empty(requests, rows),
        outputs.new_empty(requests, rows, outputs.shape[2]),
        fed_tokens.new_empty(requests, rows, rows, dtype=torch.uint8),
        fed_tokens.new_empty(requests, k),
        fed_tokens.new_empty(requests, k, dtype=torch.float32),
    )


def _meta_tree_feed(drawn: Tensor, *rest: Any) -> Fed:
    k, outputs, fed_tokens = rest[4:7]
    return empty_fed(k, outputs, fed_tokens)


_ON_META = {"draft_inputs": _meta_draft_inputs, "tree_feed": _meta_tree_feed, "tree_best": lambda *arguments: None}
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _oracle = getattr(drafting, _name)  # it does not synchronise either
    _LIBRARY.impl(_name, _oracle, "CPU")
    _LIBRARY.impl(_name, _ON_META[_name], "Meta")
    _LIBRARY.impl(_name, launched(_name, "launch_drafting", _oracle), "CUDA")

draft_inputs = torch.ops.paceline.draft_inputs.default
tree_feed = torch.ops.paceline.tree_feed.default
tree_best = torch.ops.paceline.tree_best.default
