"""Launch the kernels of drafting by the rules of `launch`: plans depend on shapes alone.

A draft's shape (levels, k, rows) is a constant of the kernels: shapes are few, and known at the start.
"""

from torch import Tensor

from models.ops.drafting import Fed
from models.ops.triton import drafting
from models.ops.triton.direct import Launch
from models.ops.triton.draft_operators import empty_fed
from models.ops.triton.launch import power_of_2

_NODES = 128  # nodes ranked by one program of `tree_best`


def plan_draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    features: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
    eps: float,
    out: Tensor,
) -> Launch:
    rows, size = features.shape
    norm = token_norm is not None and feature_norm is not None
    width = power_of_2(size)
    return Launch(
        kernel=drafting.draft_inputs,
        grid=(rows, 2),
        arguments=(
            tokens,
            embedding,
            features,
            token_norm if norm else embedding,
            feature_norm if norm else embedding,
            out,
            eps,
        ),
        constants={"SIZE": size, "WIDTH": width, "FEATURE_STRIDE": features.stride(0), "NORM": norm},
        warps=_warps(width),
    )


def draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    features: Tensor,
    token_norm: Tensor | None,
    feature_norm: Tensor | None,
    eps: float,
) -> Tensor:
    features = features if features.stride(1) == 1 else features.contiguous()
    out = features.new_empty(features.shape[0], 2 * features.shape[1])
    plan_draft_inputs(tokens, embedding, features, token_norm, feature_norm, eps, out).run()
    return out


def plan_tree_feed(
    drawn: Tensor,
    logprobs: Tensor,
    newest: Tensor | None,
    paths: Tensor | None,
    first: int,
    k: int,
    outputs: Tensor,
    before: tuple[Tensor, Tensor, Tensor],
    nodes: tuple[Tensor, Tensor, Tensor],
    found: Fed,
) -> Launch:
    tokens, hidden, mask = before
    (requests, fed), size = tokens.shape, outputs.shape[2]
    candidates, width = drawn.numel() // requests, power_of_2(size)
    return Launch(
        kernel=drafting.tree_feed,
        grid=(requests, fed + k),
        # Absent tensors are not read: any pointer is valid.
        arguments=(
            drawn,
            logprobs,
            drawn if newest is None else newest,
            logprobs if paths is None else paths,
            outputs,
            tokens if fed else drawn,
            hidden if fed else outputs,
            mask if fed else found[2],
            *nodes,
            *found,
        ),
        constants={
            "FIRST": first,
            "NODES": nodes[0].shape[1],
            "C": candidates,
            "CANDIDATES": power_of_2(candidates),
            "K": k,
            "FED": fed,
            "ROWS": power_of_2(fed + k),
            "SIZE": size,
            "WIDTH": width,
            "ROOT": newest is None,
        },
        warps=_warps(width),
    )


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
    found = empty_fed(k, outputs, fed_tokens)
    plan_tree_feed(
        drawn,
        logprobs,
        newest,
        paths,
        first,
        k,
        outputs.contiguous(),
        (fed_tokens, fed_hidden.contiguous(), fed_mask),
        (node_tokens, node_parents, node_scores),
        found,
    ).run()
    return found


def plan_tree_best(
    drawn: Tensor,
    logprobs: Tensor,
    newest: Tensor | None,
    paths: Tensor | None,
    first: int,
    nodes: tuple[Tensor, Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor],
) -> Launch:
    requests, count = found[0].shape
    candidates = drawn.numel() // requests
    return Launch(
        kernel=drafting.tree_best,
        grid=(requests, -(-(first + candidates) // _NODES)),
        arguments=(
            drawn,
            logprobs,
            drawn if newest is None else newest,
            logprobs if paths is None else paths,
            *nodes,
            *found,
        ),
        constants={
            "FIRST": first,
            "NODES": nodes[0].shape[1],
            "C": candidates,
            "K": candidates if newest is None else newest.shape[1],
            "COUNT": count,
            "BLOCK": _NODES,
            "ROOT": newest is None,
        },
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
    nodes = node_tokens, node_parents, node_scores
    plan_tree_best(drawn, logprobs, newest, paths, first, nodes, (tokens, parents, scores)).run()


def _warps(width: int) -> int:
    return min(max(width // 512, 1), 16)
