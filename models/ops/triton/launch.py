"""Launch the kernels: the CUDA implementations of the operators, and the plan of each launch as plain data.

A plan (`Launch`) names the kernel, its grid and its constants. It depends on shapes alone, so the same plans launch on
a GPU, run in Triton's interpreter and compile without a GPU, from meta tensors. Properties of a model (widths, heads,
strides) are constants of the kernel. Values that change per step (rows, requests, bounds) never are, so a captured
graph and an eager step run one binary. Nothing here synchronises with the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.ops.triton import attention, matmul, sampling, tokenwise
from models.ops.triton.direct import Launch, run_plan
from models.ops.triton.work import SPLIT_TOKENS, programs_of, tile_of

_MOST_PROGRAMS = 1056  # eight for each multiprocessor of an H100; a constant, so that plans depend on shapes alone
_LEAST_LANES = 4  # however many tiles there are: one long context among many must not wait for one program
_ATTENTION_STAGES = 5  # as Triton counts them: two buffers of keys and values (benchmarks.triton_kernels, `buffers`)
_SPLIT_BYTES = 256 * 2**20  # of partial results that may exist
_MASK_BITS = 64
_SAMPLE_BLOCKS = 1024  # of four tokens, one Philox call each
Run = Callable[..., object]  # `run_plan`, or `LayerCalls`


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _ceil(n: int, d: int) -> int:
    return -(-n // d)


def plan_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, total: Tensor | None
) -> list[Launch]:
    size = weight.shape[0]
    width = power_of_2(size)
    second, summed = (x, normed) if residual is None or total is None else (residual, total)
    return [
        Launch(
            kernel=tokenwise.rms_norm,
            grid=(x.numel() // size,),
            arguments=(x, second, weight, normed, summed, eps),
            constants={"SIZE": size, "WIDTH": width, "ADD": residual is not None},
            warps=min(max(width // 512, 1), 16),
        )
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float, run: Run = run_plan) -> Tensor:
    x = x.contiguous()
    normed = torch.empty_like(x)
    return _ran(normed, run, plan_rms_norm, x, None, weight, eps, normed, None)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, run: Run = run_plan) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _ran(normed, run, plan_rms_norm, x, residual, weight, eps, normed, total)
    return normed, total


def plan_rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
) -> list[Launch]:
    rows, query_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    norm = q_norm is not None and k_norm is not None
    width = power_of_2(head_dim // 2)
    heads = 8
    return [
        Launch(
            kernel=tokenwise.rope_write,
            grid=(rows, _ceil(query_heads + 2 * kv_heads, heads)),
            arguments=(
                qkv,
                cos,
                sin,
                positions,
                kv_slots,
                q_norm if norm else qkv,
                k_norm if norm else qkv,
                q,
                k_cache,
                v_cache,
                eps,
            ),
            constants={
                "HQ": query_heads,
                "HKV": kv_heads,
                "D": head_dim,
                "HEADS": heads,
                "WIDTH": width,
                "NORM": norm,
                "STRIDE": qkv.stride(0),
            },
            warps=min(max(heads * width // 256, 1), 4),
        )
    ]


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    run: Run = run_plan,
) -> Tensor:
    kv_heads, head_dim = k_cache.shape[1:]
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q = qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim))
    return _ran(q, run, plan_rope_write, qkv, cos, sin, positions, kv_slots, q_norm, k_norm, eps, k_cache, v_cache, q)


def plan_swiglu(gate_up: Tensor, out: Tensor) -> list[Launch]:
    rows, size = out.shape
    block = min(power_of_2(size), 1024)
    return [
        Launch(
            kernel=tokenwise.swiglu,
            grid=(rows, _ceil(size, block)),
            arguments=(gate_up, out),
            constants={"SIZE": size, "BLOCK": block},
            warps=max(block // 256, 1),
        )
    ]


def swiglu(gate_up: Tensor, run: Run = run_plan) -> Tensor:
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    return _ran(out, run, plan_swiglu, gate_up, out)


def plan_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> list[Launch]:
    rows, depth = x.shape
    columns = weight.shape[0]
    half = x.dtype is torch.bfloat16
    # Few columns: narrower tiles, so that more programs read the weight. Rows never matter.
    tile_rows, tile_columns, tile_depth = (64, 64 if columns >= 8192 else 32, 64) if half else (32, 32, 32)
    return [
        Launch(
            kernel=matmul.linear,
            grid=(_ceil(rows, tile_rows), _ceil(columns, tile_columns)),
            arguments=(x, weight, weight if bias is None else bias, out, rows),
            constants={
                "COLUMNS": columns,
                "DEPTH": depth,
                "BIAS": bias is not None,
                "TILE_ROWS": tile_rows,
                "TILE_COLUMNS": tile_columns,
                "TILE_DEPTH": tile_depth,
                "PRECISION": "ieee",
            },
            stages=4 if half else 2,
        )
    ]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, float32_out: bool) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if float32_out else x.dtype)
    return _ran(out, run_plan, plan_linear, x, weight, bias, out)


def plan_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_offsets: Tensor,
    context_lens: Tensor,
    tree_mask: Tensor | None,
    block_tokens: int,
    max_query: int,
    max_context: int,
    scale: float,
    work: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """Splits of the context and their merge; where the bound has one split only, or partial results would be too many,
    one launch that walks whole contexts. Without a work list programs of a tile share its splits in turn. Equal bits:
    splits lie at absolute positions."""
    rows, query_heads, head_dim = q.shape
    requests, kv_heads = context_lens.shape[0], k_cache.shape[1]
    groups = query_heads // kv_heads
    half = q.dtype is torch.bfloat16
    tile = tile_of(groups, q.dtype)
    tile_rows = tile // groups
    one_tile = int(max_query <= tile_rows)
    tiles = requests if one_tile else _ceil(rows, tile_rows) + requests
    padding_tiles = _ceil(rows, tile_rows) if one_tile else 0
    width = max(power_of_2(head_dim), 16)
    splits = max(_ceil(max_context, SPLIT_TOKENS), 1)
    whole = splits == 1 or splits * rows * query_heads * width * 4 > _SPLIT_BYTES
    # Bounds are far above most contexts, and idle programs cost time: launch few, each of which continues.
    lanes = 1 if whole else min(splits, max(_LEAST_LANES, _ceil(_MOST_PROGRAMS, tiles * kv_heads)))
    sums = out if whole else out.new_empty((splits, kv_heads, rows * groups, width), dtype=torch.float32)
    stats = out if whole else out.new_empty((2, splits, kv_heads, rows * groups), dtype=torch.float32)
    mask = q if tree_mask is None else tree_mask
    mask_width = 0 if tree_mask is None else tree_mask.shape[1]
    tree = 0 if tree_mask is None else 1 if mask_width <= _MASK_BITS else 2
    shared = {"HQ": query_heads, "HKV": kv_heads, "D": head_dim, "SPLIT": SPLIT_TOKENS, "TILE": tile, "WIDTH": width}
    walk = shared | {"BLOCK_TOKENS": block_tokens, "KEYS": 32 if half else 16, "TREE": tree, "PRECISION": "ieee"}
    strides, scale_log2 = (block_tables.stride(0), block_tables.stride(1)), scale * 1.4426950408889634  # in base 2
    given = q, k_cache, v_cache, block_tables, query_offsets, context_lens
    if work is not None and not whole:
        first = Launch(
            kernel=attention.attend_items,
            grid=(programs_of(kv_heads), kv_heads),
            arguments=(*given, work, mask, sums, stats, rows, *strides, mask_width, splits, scale_log2),
            constants=walk,
            stages=_ATTENTION_STAGES,
            registers=168,
        )
    else:
        first = Launch(
            kernel=attention.attend,
            grid=(tiles + (padding_tiles if whole else 0), kv_heads, lanes),
            arguments=(
                *given,
                mask,
                sums,
                stats,
                rows,
                requests,
                *strides,
                mask_width,
                one_tile,
                splits,
                scale_log2,
            ),
            constants=walk | {"APART": not whole},
            stages=_ATTENTION_STAGES,
            registers=192 if half and whole else 168,
        )
    launches = [first]
    if not whole:
        launches.append(
            Launch(
                kernel=attention.merge_splits,
                grid=(tiles + padding_tiles, kv_heads, groups),
                arguments=(sums, stats, query_offsets, context_lens, out, rows, requests, one_tile, splits),
                constants=shared | {"TREE": int(tree > 0), "AHEAD": 12},
                warps=1,
            )
        )
    return launches


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_offsets: Tensor,
    context_lens: Tensor,
    tree_mask: Tensor | None,
    block_tokens: int,
    max_query: int,
    max_context: int,
    scale: float,
    work: Tensor | None = None,
    run: Run = run_plan,
) -> Tensor:
    q = q.contiguous()
    tree_mask = None if tree_mask is None else tree_mask.contiguous()
    out = torch.empty_like(q)
    return _ran(
        out,
        run,
        plan_paged_attention,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_offsets,
        context_lens,
        tree_mask,
        block_tokens,
        max_query,
        max_context,
        scale,
        work,
        out,
    )


def plan_sample(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    *drawn: Tensor,
) -> list[Launch]:
    rows, vocab = logits.shape
    chunks = _ceil(vocab, 4 * _SAMPLE_BLOCKS)
    scores = logits.new_empty((5, rows, chunks), dtype=torch.float32)
    tokens = logits.new_empty((rows, chunks), dtype=torch.int32)
    return [
        Launch(
            kernel=sampling.sample_chunks,
            grid=(chunks, rows),
            arguments=(logits, cutoff, temperature, keys, positions, scores, tokens),
            constants={"V": vocab, "STRIDE": logits.stride(0), "BLOCKS": _SAMPLE_BLOCKS},
            warps=8,
        ),
        Launch(
            kernel=sampling.sample_rows,
            grid=(rows,),
            arguments=(logits, temperature, scores, tokens, *drawn),
            constants={"STRIDE": logits.stride(0), "CHUNKS": chunks, "WIDTH": power_of_2(chunks)},
            warps=1,
        ),
    ]


def sample(
    logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = keys.new_empty(logits.shape[0])
    logprobs = logits.new_empty(logits.shape[0], dtype=torch.float32)
    drawn = tokens, logprobs, torch.empty_like(logprobs)
    if logits.shape[0]:
        _ran(tokens, run_plan, plan_sample, logits, cutoff, temperature, keys, positions, *drawn)
    return drawn


def plan_sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    noise: bool,
    *drawn: Tensor,
) -> list[Launch]:
    rows, vocab = logits.shape
    k = drawn[0].shape[1]
    chunks = _ceil(vocab, 4 * _SAMPLE_BLOCKS)
    masses = logits.new_empty((2, rows, chunks), dtype=torch.float32)
    values = logits.new_empty((rows, chunks, k), dtype=torch.float32)
    tokens = logits.new_empty((rows, chunks, k), dtype=torch.int32)
    candidates = power_of_2(chunks * k)
    return [
        Launch(
            kernel=sampling.topk_chunks,
            grid=(chunks, rows),
            arguments=(logits, cutoff, temperature, keys, positions, masses, values, tokens, scale),
            constants={"V": vocab, "STRIDE": logits.stride(0), "BLOCKS": _SAMPLE_BLOCKS, "K": k, "NOISE": noise},
            warps=8,
        ),
        Launch(
            kernel=sampling.topk_rows,
            grid=(rows,),
            arguments=(masses, values, tokens, *drawn, scale),
            constants={"CHUNKS": chunks, "WIDTH": power_of_2(chunks), "K": k, "CANDIDATES": candidates},
            warps=min(max(candidates // 128, 1), 8),
        ),
    ]


def sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    scale: float,
    noise: bool,
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drawn = keys.new_empty((logits.shape[0], k)), logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    if logits.shape[0]:
        _ran(drawn[0], run_plan, plan_sample_topk, logits, cutoff, temperature, keys, positions, scale, noise, *drawn)
    return drawn


def plan_cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, least: Tensor) -> list[Launch]:
    rows, vocab = logits.shape
    block = min(power_of_2(vocab), 8192)
    return [
        Launch(
            kernel=sampling.cutoff,
            grid=(rows,),
            arguments=(logits, temperature, top_k, top_p, least),
            constants={"V": vocab, "STRIDE": logits.stride(0), "BLOCK": block},
            warps=min(max(block // 256, 1), 16),
        )
    ]


def cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    least = temperature.new_empty(logits.shape[0])
    return _ran(least, run_plan, plan_cutoff, logits, temperature, top_k, top_p, least)


def _ran(out: Tensor, run: Run, plan: Callable[..., list[Launch]], *arguments: Any) -> Tensor:
    if out.numel():
        run(plan, *arguments)
    return out
