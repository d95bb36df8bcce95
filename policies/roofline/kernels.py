"""The kernels of one engine step as a list, by shape: bytes read and written, flops, and launches.

Owns the list that the CUDA engine must launch (ten per layer, a sampler of two); a test compares the engine's real step
with it. Excludes times (`policies.roofline.timing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from config.formats import LowBitFormat
from config.network import Network
from config.strategy import Strategy

Part = Literal["weights", "kv", "sampling", "rest"]
# Of the paged attention kernel (models/ops/triton/launch.py; a test holds them equal): tokens of the context that one
# block walks, rows of a tile, the most partial results, and programs that walk a work list.
SPLIT_TOKENS, _TILE, _PARTIAL_BYTES, _PROGRAMS = 256, 32, 256 << 20, 396
_SPLIT_PROGRAMS = 264  # of products in few bits
# Instructions as counted in sm_90's code (results/triton_kernels.json; a test holds them equal). Of products by four
# bits, per weight of a tile: by format, rows of the tile, and whether the matrix has 8,192 columns or more.
UNPACKED = {
    ("int8", 16, True): 3.1,
    ("int8", 16, False): 3.6,
    ("int8", 32, True): 4.1,
    ("int8", 32, False): 4.1,
    ("int8", 64, True): 5.5,
    ("int8", 64, False): 7.1,
    ("int8", 128, True): 7.3,
    ("int8", 128, False): 7.3,
    ("none", 16, True): 3.1,
    ("none", 16, False): 4.0,
    ("none", 32, True): 5.4,
    ("none", 32, False): 6.4,
}
GATED = {"int8": 38.0, "float8_e4m3fn": 46.0}  # of SwiGLU in eight bits, per number that its program has (`_filled`)
_INDEX_BYTES = 8
_LOGIT_BYTES = 4  # float32 on CUDA


@dataclass(frozen=True, slots=True)
class Walk:
    """A grid in which every block walks its keys tile by tile, for `rows` rows of queries."""

    blocks: int
    keys: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The weights of a product in few bits, read by `programs`, of which each has a tile of `rows` and `columns`, and
    has asked for `under_way` bytes that did not arrive yet. With splits, one program of a tile adds `added` bytes of
    sums once all have ended."""

    programs: int
    rows: int
    columns: int
    under_way: int
    splits: int
    added: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operation of a step; bytes and flops of all its launches together."""

    name: str
    part: Part
    read_bytes: int
    write_bytes: int
    flops: float = 0.0
    launches: int = 1
    product: tuple[int, int, int] | None = None  # (m, n, k) of a matrix product: [m, k] times [k, n]
    speed: float = 1.0  # of its flops, relative to bfloat16
    unpacked: float = 0.0  # instructions that unpack weights of four bits, per weight of a thread
    walk: Walk | None = None
    stream: Stream | None = None
    by_row: tuple[int, float] | None = None  # rows, of a program each, and the instructions of its threads together
    early: bool = False  # its programs start while the kernel before ends, if that is such a kernel too

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


def step_kernels(
    net: Network, batch: int, rows: int, context: int, *, split_tokens: int = SPLIT_TOKENS
) -> list[Kernel]:
    """Return the kernels of one step: `batch` requests with `rows` rows each, and contexts of `context` tokens
    including these rows.

    rows 1 is plain decoding, 1 + tokens to verify a verification; a prompt chunk is a batch of 1 with many rows.
    """
    total = batch * rows
    return [
        *_drawn(net, batch, rows, context, split_tokens),
        Kernel(name="pack", part="rest", read_bytes=total * 16, write_bytes=total * 16),  # draws, for one download
    ]


def _drawn(
    net: Network, batch: int, rows: int, context: int, split_tokens: int = SPLIT_TOKENS, *, copy: bool = False
) -> Iterator[Kernel]:
    """Yield a forward, and a draw from every row. copy: for a drafting copy, whose head may also be low-bit."""
    total = batch * rows
    yield from embed(net, total)
    yield from block(net, batch, rows, context, layers=net.num_layers, split_tokens=split_tokens)
    yield _normed(net, "add_rms_norm", total, 2, 1)
    if copy and (form := net.head_bits) is not None:
        yield from projection(replace(net, low_bits=form), "head", total, net.vocab_size, net.hidden_size)
        yield from sampling(net, total, net.item_bytes)
    else:
        yield from head(net, total)
        yield from sampling(net, total)


def embed(net: Network, total: int) -> Iterator[Kernel]:
    """Yield the lookup of rows of the embedding."""
    moved = total * net.hidden_size * net.item_bytes
    yield Kernel(name="embed", part="rest", read_bytes=moved + total * _INDEX_BYTES, write_bytes=moved)


def block(
    net: Network,
    batch: int,
    rows: int,
    context: int,
    *,
    layers: int = 1,
    inputs: int = 1,
    first_norm: bool = True,
    split_tokens: int = SPLIT_TOKENS,
) -> Iterator[Kernel]:
    """Yield decoder layers: ten launches each, plus one for tokens of o where they are rounded; norms and SwiGLU round
    theirs, but for the first norm. inputs: input of the first matrix, in widths of the residual stream."""
    total, item = batch * rows, net.item_bytes
    hidden, inner = net.hidden_size, net.intermediate_size
    rounds = net.rounds_tokens
    for layer in range(layers):
        whole = first_norm and layer == 0
        if whole:
            yield _normed(net, "rms_norm", total, 1, 1)
        elif first_norm:
            yield _add_norm(net, total)
        yield from projection(
            net, "qkv", total, net.qkv_size, inputs * hidden, bias=net.qkv_bias, rounded=rounds and not whole
        )
        tables = total * (net.head_dim * 4 + 2 * _INDEX_BYTES)  # cos and sin, position and slot
        moved = total * net.qkv_size * item
        yield Kernel(name="rope_write", part="rest", read_bytes=moved + tables, write_bytes=moved, early=True)
        yield attention(net, batch, rows, context, split_tokens)
        yield from projection(net, "o", total, hidden, net.query_size)
        yield _add_norm(net, total)
        yield from projection(net, "gate_up", total, 2 * inner, hidden, rounded=rounds)
        gated = Kernel(
            name="swiglu",
            part="rest",
            read_bytes=2 * total * inner * item,
            write_bytes=total * inner * item,
            early=True,
        )
        if net.low_bits is not None and rounds:
            written, work = rounded_bytes(total, inner), (total, GATED[net.low_bits.activations] * _filled(inner))
            gated = replace(gated, name="swiglu_quantise", write_bytes=written, by_row=work)
        yield gated
        yield from projection(net, "down", total, hidden, inner, rounded=rounds)


def attention(net: Network, batch: int, rows: int, context: int, split_tokens: int) -> Kernel:
    """Return paged attention: two launches, for splits of the context and their merge, or one for a single split. Every
    key and value is read once per request; a row attends to those before it and its own."""
    total, item = batch * rows, net.item_bytes
    groups = net.num_heads // net.num_kv_heads
    tile_rows = max(1, max(_TILE, groups) // groups)
    tiles = batch if rows <= tile_rows else -(-total // tile_rows) + batch
    splits = max(1, -(-context // split_tokens))
    partial = total * net.num_heads * splits * (net.head_dim + 2) * 4  # float32 sums, maximum and weight
    if splits == 1 or partial > _PARTIAL_BYTES:
        splits, partial = 1, 0
    seen = context - (rows - 1) / 2  # keys of the average row
    kv = batch * context * 2 * net.kv_size * item
    query = total * net.query_size * item
    pages = batch * -(-context // 16) * 4
    keys = split_tokens if splits > 1 else round(seen)
    return Kernel(
        name="paged_attention",
        part="kv",
        read_bytes=kv + query + pages + partial,
        write_bytes=partial + query,
        flops=4.0 * total * net.query_size * seen,
        launches=1 if splits == 1 else 2,
        walk=Walk(tiles * net.num_kv_heads * splits, keys, min(groups * min(rows, tile_rows), _TILE)),
        early=True,
    )


def listed_attention(net: Network, contexts: Sequence[int]) -> Kernel:
    """Paged attention of one row each for requests of these contexts, by a work list: programs share all splits evenly,
    and every one walks its share."""
    requests, groups = len(contexts), net.num_heads // net.num_kv_heads
    splits = sum(-(-context // SPLIT_TOKENS) for context in contexts)
    programs = max(_PROGRAMS // net.num_kv_heads, 1)
    partial = splits * net.num_heads * (net.head_dim + 2) * 4
    query = requests * net.query_size * net.item_bytes
    return Kernel(
        name="paged_attention",
        part="kv",
        read_bytes=sum(contexts) * net.kv_token_bytes // net.num_layers + query + partial,
        write_bytes=partial + query,
        flops=4.0 * net.query_size * sum(contexts),
        launches=2,
        walk=Walk(min(programs, splits) * net.num_kv_heads, -(-splits // programs) * SPLIT_TOKENS, min(groups, _TILE)),
        early=True,
    )


def head(net: Network, total: int) -> Iterator[Kernel]:
    """Yield the head: hidden states [total, H] to float32 logits [total, V]."""
    yield product(net, "head", total, net.vocab_size, net.hidden_size, out_bytes=_LOGIT_BYTES)


def sampling(net: Network, total: int, logit_bytes: int = _LOGIT_BYTES) -> Iterator[Kernel]:
    """Yield draws and log-probs from logits [total, V]: one pass over them, and the merge of its parts."""
    read = total * net.vocab_size * logit_bytes
    yield Kernel(name="sample", part="sampling", read_bytes=read, write_bytes=total * 32, launches=2)


def draft_kernels(
    net: Network, batch: int, strategy: Strategy, context: int, copy: LowBitFormat | None = None
) -> list[Kernel]:
    """Return a drafter's kernels for one step, as the engine's drafter launches them; empty for one that is no network.

    EAGLE's drafter processes at most the tokens of a usual step, draws, and then feeds the drawn tokens level by level;
    a tree feeds all of its rows again. The last level's tokens need no pass. The self-drafter runs a copy of the
    target, stored in `copy` (None: as the target is), over the target's own keys and values, from the last known token
    on.
    """
    few = batch * strategy.tokens_to_verify * 20
    if strategy.drafter == "self":
        own = net.copied(copy)
        passes = [
            kernel for level in range(strategy.depth) for kernel in _drawn(own, batch, 1, context + level, copy=True)
        ]
        return [*passes, Kernel(name="tokens", part="rest", read_bytes=few, write_bytes=few)]
    if strategy.drafter != "eagle":
        return []
    k = strategy.top_k
    kernels = [_moved(net, "gather", batch * (strategy.depth + 1))]
    kernels += [*_eagle_pass(net, batch, strategy.depth + 1, context), _moved(net, "last", batch)]
    kernels += [*head(net, batch), *sampling(net, batch)]
    for level in range(1, strategy.depth):
        rows = level * k if strategy.is_tree else 1
        if strategy.is_tree:
            kernels.append(_moved(net, "tree_feed", batch * rows))
        kernels += _eagle_pass(net, batch, rows, context)
        if rows > k:
            kernels.append(_moved(net, "newest", batch * k))
        kernels += [*head(net, batch * k), *sampling(net, batch * k)]
    # Tokens and scores of a chain in sequence, or the best nodes of a tree.
    ends = ("tree_best",) if strategy.is_tree else ("tokens", "scores")
    return kernels + [Kernel(name=name, part="rest", read_bytes=few, write_bytes=few) for name in ends]


def _eagle_pass(net: Network, batch: int, rows: int, context: int) -> Iterator[Kernel]:
    net, total = replace(net, low_bits=None), batch * rows  # a drafter's own weights keep their dtype
    moved = 2 * total * net.hidden_size * net.item_bytes
    yield Kernel(name="draft_inputs", part="rest", read_bytes=moved + total * _INDEX_BYTES, write_bytes=moved)
    yield product(net, "fuse", total, net.hidden_size, 2 * net.hidden_size)
    yield from block(net, batch, rows, context, first_norm=False)
    yield Kernel(name="add", part="rest", read_bytes=moved, write_bytes=moved // 2)


def _moved(net: Network, name: str, total: int) -> Kernel:
    """Return a kernel that reads and writes rows of the hidden size once."""
    moved = total * net.hidden_size * net.item_bytes
    return Kernel(name=name, part="rest", read_bytes=moved, write_bytes=moved)


def product(
    net: Network, name: str, m: int, n: int, k: int, *, bias: bool = False, out_bytes: int | None = None
) -> Kernel:
    """Return the product of [m, k] and a weight [n, k]."""
    item = net.item_bytes
    return Kernel(
        name=name,
        part="weights",
        read_bytes=(n * k + m * k + bias * n) * item,
        write_bytes=m * n * (out_bytes or item),
        flops=2.0 * m * n * k,
        product=(m, n, k),
    )


def projection(
    net: Network, name: str, m: int, n: int, k: int, *, bias: bool = False, rounded: bool = False
) -> Iterator[Kernel]:
    """Yield the product of [m, k] and a block's matrix [n, k] as stored. Low-bit formats that round tokens do so first,
    unless they are `rounded` already."""
    low, item = net.low_bits, net.item_bytes
    if low is None:
        yield product(net, name, m, n, k, bias=bias)
        return
    tokens = m * k * item
    if net.rounds_tokens:
        eight = rounded_bytes(m, k)
        if not rounded:
            yield Kernel(name="quantise_tokens", part="rest", read_bytes=tokens, write_bytes=eight, early=True)
        tokens = eight
    tile_rows, per_weight, stream = _tiled(low, m, n, k)
    yield Kernel(
        name=name,
        part="weights",
        read_bytes=net.matrix_bytes(n, k) + tokens + bias * n * item,
        write_bytes=m * n * item,
        flops=2.0 * m * n * k,
        product=(m, n, k),
        speed=2.0 if net.rounds_tokens else 1.0,
        unpacked=n * k * -(-m // tile_rows) * per_weight,
        stream=stream,
        early=True,
    )


def _filled(size: int) -> int:
    """Return the numbers that a program has for a row of so many: the largest power of two in it, and one for the
    rest."""
    head = 1 << size.bit_length() - 1
    return head + (1 << (size - head - 1).bit_length() if size > head else 0)


def rounded_bytes(m: int, k: int) -> int:
    """Return the bytes of tokens [m, k] in eight bits, with a scale each."""
    return m * (k + 4)


def _tiled(low: LowBitFormat, m: int, n: int, k: int) -> tuple[int, float, Stream]:
    """Return the rows of a kernel's tile, instructions per weight and tile, and its programs: of models/ops/triton's
    launch_low_bit (a test holds programs equal), instructions as counted in sm_90's code (results/triton_kernels)."""
    wide, steps = n >= 8192, -(-k // 128)
    columns = 64 if wide else 32
    if low.activations == "none":
        rows = 32 if m > 16 else 16
        columns = 64 if m > 16 or not wide else 128
        parts = _parts(-(-n // (128 if wide else 64)), low.groups(k), 8)
        stream = _stream(m, n, rows, columns, parts, 3 if m > 16 or wide else 5, 64)
        return rows, UNPACKED["none", rows, wide], stream
    if low.activations != "int8":
        return 64, 0.0, _stream(m, n, 64, columns, _parts(-(-n // columns), steps, 16), 3 if wide else 5, 128)
    eight = low.bits == 8
    if m > 64:
        rows, columns, buffers = 128, 128, 2
    elif m > 32:
        rows, buffers = 64, 3
    else:
        rows, columns, buffers = (16 if m <= 16 else 32), columns if eight else 64, (3 if wide else 6) if eight else 5
    tiles = -(-m // rows) * -(-n // columns)
    if eight:
        splits = max(1, min(_SPLIT_PROGRAMS // tiles, steps // 4, 4)) if m > 64 else _most_splits(tiles, steps, 16)
        return rows, 0.0, _stream(m, n, rows, columns, splits, buffers, 128)
    groups = low.groups(k)
    splits = _most_splits(tiles, groups, 8) if m <= 16 else 1
    stream = _stream(m, n, rows, columns, splits, buffers, 64, groups - groups // splits + 1)
    return rows, UNPACKED["int8", rows, wide], stream


def _most_splits(tiles: int, steps: int, least: int) -> int:
    return max(1, min(_SPLIT_PROGRAMS // tiles, steps // least, 16))


def _parts(tiles: int, steps: int, least: int) -> int:
    """Return the fixed parts of a K of so many steps."""
    return -(-steps // -(-steps // _most_splits(tiles, steps, least)))


def _stream(
    m: int, n: int, rows: int, columns: int, splits: int, buffers: int, step_bytes: int, slots: int | None = None
) -> Stream:
    tiles = -(-m // rows) * -(-n // columns)
    if tiles >= _SPLIT_PROGRAMS:
        splits = 1
    added = 0 if splits == 1 else (slots or splits) * min(m, rows) * columns * 4
    return Stream(
        programs=tiles * splits,
        rows=rows,
        columns=columns,
        under_way=buffers * columns * step_bytes,
        splits=splits,
        added=added,
    )


def _normed(net: Network, name: str, total: int, reads: int, writes: int) -> Kernel:
    row = total * net.hidden_size * net.item_bytes
    weight = net.hidden_size * net.item_bytes
    return Kernel(name=name, part="rest", read_bytes=reads * row + weight, write_bytes=writes * row, early=True)


def _add_norm(net: Network, total: int) -> Kernel:
    """Return the norm before a product, as the product takes its tokens."""
    if not net.rounds_tokens:
        return _normed(net, "add_rms_norm", total, 2, 2)
    kernel = _normed(net, "add_norm_quantise", total, 2, 1)
    return replace(kernel, write_bytes=kernel.write_bytes + rounded_bytes(total, net.hidden_size))


def floor_bytes(net: Network, batch: int, context: int) -> int:
    """Return the bytes that any step must read: every used weight, and every key and value, once."""
    return net.read_bytes + batch * context * net.kv_token_bytes


def launches(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.launches for kernel in kernels)
