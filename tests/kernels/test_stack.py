"""The fused stack equals, bitwise, the module that calls one operation after another."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.formats import FORMATS
from models import ops
from models.config import ModelConfig
from models.low_bit import quantise
from models.transformer import Block, Transformer
from tests.models.families import CONFIGS, VOCAB

pytestmark = pytest.mark.usefixtures("native")

FAMILIES = ("llama3-rope-biases", "qwen2", "qwen3", "qwen3-tied-biases")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_TOKENS = 8


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_model(family: str, dtype: torch.dtype, seed: int = 0, **changed: int) -> Transformer:
    """Every term matters: norms around one, biases not zero."""
    config = ModelConfig.from_hf(CONFIGS[family].to_dict() | changed)
    model = Transformer(config, dtype=dtype, batch_invariant=True)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.3)
        parameter.data.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model


def low_bit_model(family: str, dtype: torch.dtype, name: str, seed: int = 0) -> Transformer:
    """A `random_model`, of a width that the format's groups divide, whose matrices are in few bits."""
    grouped = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 48}  # of 128, 64, 64
    model = random_model(family, dtype, seed, **({} if FORMATS[name].group is None else grouped))
    masters = [getattr(block, product).weight for block in model.blocks for product in Block.PROJECTIONS]
    with model.storing(FORMATS[name]):
        products = [getattr(block, product) for block in model.blocks for product in Block.PROJECTIONS]
        for product, master in zip(products, masters, strict=True):
            for mine, new in zip(product.stored.parts, quantise(master, FORMATS[name]).parts, strict=True):
                mine.copy_(new)
    return model


def stack_of(model: Transformer) -> ops.DecoderStack:
    config, angles = model.config, model.rope.table(torch.device("cpu"))
    return ops.DecoderStack(
        [block.stack_layer(block.input_norm.weight) for block in model.blocks if isinstance(block, Block)],
        model.embed_tokens.weight,
        model.norm.weight,
        angles.cos,
        angles.sin,
        query_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        eps=config.rms_norm_eps,
    )


@dataclasses.dataclass(slots=True)
class Paged:
    """Rows of requests over a paged cache of random earlier tokens: a context of the module, arguments of the stack."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    kv_slots: Tensor
    block_tables: Tensor
    query_offsets: Tensor
    context_lens: Tensor
    tree_mask: Tensor | None = None

    @classmethod
    def make(cls, model: Transformer, context: list[int], queries: list[int], seed: int = 0) -> "Paged":
        config, generator = model.config, torch.Generator().manual_seed(seed)
        blocks = [-(-length // BLOCK_TOKENS) for length in context]
        order = torch.randperm(sum(blocks), generator=generator).to(torch.int32)
        tables = torch.zeros((len(context), max(blocks)), dtype=torch.int32)
        positions, slots, used = [], [], 0
        for i, (length, count) in enumerate(zip(context, queries, strict=True)):
            tables[i, : blocks[i]] = order[used : used + blocks[i]]
            used += blocks[i]
            place = torch.arange(length - count, length)
            positions.append(place)
            slots.append(tables[i, place // BLOCK_TOKENS].long() * BLOCK_TOKENS + place % BLOCK_TOKENS)
        shape = (config.num_layers, sum(blocks) * BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        dtype = model.embed_tokens.weight.dtype
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        offsets = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        lens = torch.tensor(context, dtype=torch.int32)
        return cls(keys, values, torch.cat(positions), torch.cat(slots), tables, offsets, lens)

    def copy(self) -> "Paged":
        return dataclasses.replace(self, keys=self.keys.clone(), values=self.values.clone())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.write_kv(k, v, self.keys[layer], self.values[layer], self.kv_slots)
        tables = (self.block_tables, self.query_offsets, self.context_lens, BLOCK_TOKENS)
        scale = q.shape[-1] ** -0.5
        return ops.paged_attention(q, self.keys[layer], self.values[layer], *tables, scale, tree_mask=self.tree_mask)

    def run(self, stack: ops.DecoderStack, tokens: Tensor) -> Tensor:
        return stack(
            tokens,
            self.positions,
            self.kv_slots,
            self.keys,
            self.values,
            self.block_tables,
            self.query_offsets,
            self.context_lens,
            BLOCK_TOKENS,
            tree_mask=self.tree_mask,
        )


def tokens_for(paged: Paged, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, paged.positions.shape, generator=torch.Generator().manual_seed(seed))


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)  # NaN never equals, and nothing here may be NaN


def check(model: Transformer, stack: ops.DecoderStack, paged: Paged) -> Tensor:
    """One step through both; hidden states and caches agree bitwise."""
    separate, tokens = paged.copy(), tokens_for(paged)
    with torch.inference_mode():
        expected = model(tokens, separate)
        actual = paged.run(stack, tokens)
    assert_bitwise(actual, expected)
    assert_bitwise(paged.keys, separate.keys)
    assert_bitwise(paged.values, separate.values)
    return actual


@pytest.mark.parametrize("count", [1, 2], ids=["1-thread", "2-threads"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_of_every_batch(family: str, dtype: torch.dtype, count: int) -> None:
    model = random_model(family, dtype)
    stack = stack_of(model)
    with threads(count):
        for batch in (64, 1, 2, 3, 5, 6, 7, 12, 13, 31, 33):  # The workspace also serves fewer rows than it holds.
            context = [1 + (7 * i) % 61 for i in range(batch)]
            check(model, stack, Paged.make(model, context, [1] * batch, seed=batch))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    count=st.integers(1, 2),
    with_tree=st.booleans(),
    seed=st.integers(0, 99),
)
def test_chunks_decoding_and_trees(
    dtype: torch.dtype, family: str, requests: list[tuple[int, int]], count: int, with_tree: bool, seed: int
) -> None:
    model = random_model(family, dtype, seed)
    queries = [rows for _, rows in requests]
    paged = Paged.make(model, [before + rows for before, rows in requests], queries, seed)
    if with_tree:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand((sum(queries), max(queries)), generator=generator) < 0.5
        row = torch.cat([torch.arange(rows) for rows in queries])
        mask &= torch.arange(max(queries)) < row[:, None]
        mask[torch.arange(len(row)), row] = True  # A row sees itself.
        paged.tree_mask = mask
    with threads(count):
        check(model, stack_of(model), paged)


@pytest.mark.parametrize("count", [1, 2], ids=["1-thread", "2-threads"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "name"), [*((family, "w8a8") for family in FAMILIES), ("qwen3-tied-biases", "w4a8"), ("qwen2", "w2a8")]
)
def test_products_in_few_bits(family: str, name: str, dtype: torch.dtype, count: int) -> None:
    model = low_bit_model(family, dtype, name)
    stack = stack_of(model)
    with threads(count):
        for batch in (1, 3, 13, 40):
            check(model, stack, Paged.make(model, [1 + (7 * i) % 61 for i in range(batch)], [1] * batch, seed=batch))
        check(model, stack, Paged.make(model, [400, 350, 9], [380, 1, 9]))


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_low_bit_weights_changed_in_place_are_never_stale(name: str) -> None:
    model, other = (low_bit_model("qwen2", torch.float32, name, seed) for seed in (0, 1))
    stack = stack_of(model)
    paged = Paged.make(model, [9, 3], [2, 3])
    before = check(model, stack, paged.copy())
    theirs = dict(other.named_buffers()) | dict(other.named_parameters())
    with torch.no_grad():
        for name_, mine in (*model.named_buffers(), *model.named_parameters()):
            mine.copy_(theirs[name_])
    after = check(model, stack, paged.copy())
    assert not torch.equal(before, after)
    assert_bitwise(after, check(other, stack_of(other), paged.copy()))


def test_products_of_one_stack_are_in_one_format() -> None:
    model, other = low_bit_model("qwen2", torch.float32, "w4a8"), low_bit_model("qwen2", torch.float32, "w2a8")
    exact = random_model("qwen2", torch.float32, hidden_size=128, intermediate_size=320, num_attention_heads=4)
    for first, second, reason in ((model, other, "in w4a8"), (model, exact, "in w4a8"), (exact, other, "is in w2a8")):
        first.blocks[1] = second.blocks[0]
        with pytest.raises(ValueError, match=f"layer 1 qkv: .*{reason}"):
            stack_of(first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rows_are_shared_between_threads_without_a_trace(dtype: torch.dtype) -> None:
    """Enough rows that every operation splits its work."""
    model = random_model("qwen3", dtype)
    stack = stack_of(model)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(check(model, stack, Paged.make(model, [400, 350, 9], [380, 1, 9])))
    for other in results[1:]:
        assert_bitwise(other, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    model = random_model("llama3-rope-biases", dtype)
    stack = stack_of(model)
    together = Paged.make(model, [20, 33, 5], [4, 1, 5])
    tokens = tokens_for(together)
    alone = Paged(
        together.keys.clone(),
        together.values.clone(),
        together.positions[4:5],
        together.kv_slots[4:5],
        together.block_tables[1:2],
        torch.tensor([0, 1], dtype=torch.int32),
        together.context_lens[1:2],
    )
    assert_bitwise(alone.run(stack, tokens[4:5])[0], together.run(stack, tokens)[4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_changed_in_place_are_never_stale(dtype: torch.dtype) -> None:
    model, other = random_model("qwen2", dtype), random_model("qwen2", dtype, seed=1)
    stack = stack_of(model)
    paged = Paged.make(model, [9, 3], [2, 3])
    before = check(model, stack, paged.copy())
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    after = check(model, stack, paged.copy())
    assert not torch.equal(before, after)
    assert_bitwise(after, check(other, stack_of(other), paged.copy()))


def test_a_weight_changed_behind_the_counter_needs_prepack() -> None:
    model = random_model("qwen3", torch.float32)
    stack = stack_of(model)
    block = model.blocks[1]
    assert isinstance(block, Block)
    weight = block.down_proj.weight
    weight.data.neg_()  # The version counter does not see it.
    ops.prepack(weight)
    check(model, stack, Paged.make(model, [9, 3], [2, 3]))


def test_a_parameter_that_gets_other_storage_leaves_the_stack_its_own() -> None:
    """Addresses stay valid: no crash and no garbage, but the weights that the stack was built with."""
    model = random_model("qwen3", torch.float32)
    stack = stack_of(model)
    paged = Paged.make(model, [9, 3], [2, 3])
    before = check(model, stack, paged.copy())
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, float("nan"))
    assert_bitwise(paged.run(stack, tokens_for(paged)), before)


def test_errors_say_what_is_wrong_and_write_nothing() -> None:
    model = random_model("qwen3", torch.float32)
    stack = stack_of(model)
    paged = Paged.make(model, [9, 3], [2, 3])
    keys, tokens = paged.keys.clone(), tokens_for(paged)
    good = paged.positions.clone(), paged.kv_slots.clone()
    for bad_token in (-1, VOCAB):
        with pytest.raises(IndexError, match=f"row 0: token {bad_token} is outside 0..{VOCAB - 1}"):
            paged.run(stack, torch.tensor([bad_token, 1, 1, 1, 1]))
    paged.positions[4] = 512
    with pytest.raises(IndexError, match="row 4: position 512"):
        paged.run(stack, tokens)
    paged.positions, paged.kv_slots[1] = good[0], keys.shape[1]
    with pytest.raises(IndexError, match="row 1: KV cache slot"):
        paged.run(stack, tokens)
    paged.kv_slots = good[1]
    with pytest.raises(ValueError, match=r"must be \[4\]"):
        paged.run(stack, tokens[:4])
    assert_bitwise(paged.keys, keys)
    paged.keys = paged.keys.bfloat16()
    with pytest.raises(ValueError, match="dtype"):
        paged.run(stack, tokens)
    block = model.blocks[0]
    assert isinstance(block, Block)
    layer = block.stack_layer(block.input_norm.weight)
    angles = model.rope.table(torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 0 qkv: needs a contiguous CPU tensor"):
        ops.DecoderStack(
            [layer],
            model.embed_tokens.weight,
            model.norm.weight,
            angles.cos,
            angles.sin,
            query_heads=3,
            kv_heads=1,
            eps=1e-6,
        )
