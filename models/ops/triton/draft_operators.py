"""The operators of drafting among `paceline::*`: schema, CPU (the oracle), meta (shapes), CUDA (one kernel each).

Beside `operators`, whose rules hold here too; `models.ops.drafting` says what each computes.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from models.ops import drafting
from models.ops.drafting import Fed

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


def _empty_fed(k: int, outputs: Tensor, fed_tokens: Tensor) -> Fed:
    """What `tree_feed` returns, to be filled in."""
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
    return _empty_fed(k, outputs, fed_tokens)


def _cuda(name: str) -> Any:
    """The kernel, imported when it is first called; the oracle where there is no Triton, which needs no host either."""
    call: Any = None

    def launch(*arguments: Any) -> Any:
        nonlocal call
        if call is None:
            installed = importlib.util.find_spec("triton") is not None
            call = globals()[f"_launch_{name}"] if installed else getattr(drafting, name)
        return call(*arguments)

    return launch


def _launch_draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    features: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
    eps: float,
) -> Tensor:
    from models.ops.triton import drafting as kernels

    rows, size = features.shape
    out = features.new_empty(rows, 2 * size)
    features = features if features.stride(1) == 1 else features.contiguous()
    norm = token_norm is not None and feature_norm is not None
    width = _power_of_two(size)
    kernels.draft_inputs[(rows, 2)](
        tokens,
        embedding,
        features,
        token_norm if norm else embedding,
        feature_norm if norm else embedding,
        out,
        eps,
        SIZE=size,
        WIDTH=width,
        FEATURE_STRIDE=features.stride(0),
        NORM=norm,
        num_warps=_warps(width),
    )
    return out


def _launch_tree_feed(
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
    from models.ops.triton import drafting as kernels

    requests, fed = fed_tokens.shape
    size, candidates = outputs.shape[2], drawn.numel() // requests
    tokens, hidden, mask, new_newest, new_paths = found = _empty_fed(k, outputs, fed_tokens)
    root = newest is None
    width = _power_of_two(size)
    kernels.tree_feed[(requests, fed + k)](
        drawn,
        logprobs,
        drawn if newest is None else newest,
        logprobs if paths is None else paths,
        outputs.contiguous(),
        fed_tokens if fed else drawn,
        fed_hidden.contiguous() if fed else outputs,
        fed_mask if fed else mask,
        node_tokens,
        node_parents,
        node_scores,
        tokens,
        hidden,
        mask,
        new_newest,
        new_paths,
        FIRST=first,
        NODES=node_tokens.shape[1],
        C=candidates,
        CANDIDATES=_power_of_two(candidates),
        K=k,
        FED=fed,
        ROWS=_power_of_two(fed + k),
        SIZE=size,
        WIDTH=width,
        ROOT=root,
        num_warps=_warps(width),
    )
    return found


def _launch_tree_best(
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
    from models.ops.triton import drafting as kernels

    requests, count = tokens.shape
    candidates = drawn.numel() // requests
    block = 128
    kernels.tree_best[(requests, -(-(first + candidates) // block))](
        drawn,
        logprobs,
        drawn if newest is None else newest,
        logprobs if paths is None else paths,
        node_tokens,
        node_parents,
        node_scores,
        tokens,
        parents,
        scores,
        FIRST=first,
        NODES=node_tokens.shape[1],
        C=candidates,
        K=candidates if newest is None else newest.shape[1],
        COUNT=count,
        BLOCK=block,
        ROOT=newest is None,
        num_warps=4,
    )


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _warps(width: int) -> int:
    return min(max(width // 512, 1), 16)


_ON_META = {"draft_inputs": _meta_draft_inputs, "tree_feed": _meta_tree_feed, "tree_best": lambda *arguments: None}
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, getattr(drafting, _name), "CPU")
    _LIBRARY.impl(_name, _ON_META[_name], "Meta")
    _LIBRARY.impl(_name, _cuda(_name), "CUDA")

draft_inputs = torch.ops.paceline.draft_inputs.default
tree_feed = torch.ops.paceline.tree_feed.default
tree_best = torch.ops.paceline.tree_best.default
