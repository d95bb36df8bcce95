"""A chain of drafts in one native call is bitwise the separate passes of the copy's own modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batch.slots import SlotTable
from actors.engine.native.forward.chains import CpuChains
from actors.engine.native.forward.context import KVCache
from config.formats import FORMATS
from drafter.protocol import BatchView
from models.checkpoint import init_model
from models.low_bit import quantise
from models.low_bit_copy import LARGEST_HEAD, copy_bytes, head_format, low_bit_copy, round_again
from models.ops.low_bit import low_bit_linear, low_bit_panels, requantise
from models.ops.native import kernels
from models.transformer import Block, LowBitProjection, Transformer
from tests.engine.support import FAMILIES, VOCAB, write_config
from tests.native import needs_native

pytestmark = needs_native
SLOTS, BLOCK, CONTEXT = 6, 8, 96


def wide_model(
    directory: Path, family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any
) -> Transformer:
    """A model whose matrices have whole groups of 128."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = init_model(
        write_config(directory, family, **({"initializer_range": 0.1} | shape | changes)), 0, dtype=dtype
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


class Scene:
    """Requests in the middle of their responses, with whatever K/V."""

    def __init__(self, model: Transformer, seed: int, requests: int) -> None:
        rng = np.random.default_rng(seed)
        self.model, blocks = model, CONTEXT // BLOCK
        self.table = SlotTable(SLOTS, CONTEXT, blocks)
        self.table.block_tables[:] = rng.permutation(SLOTS * blocks).reshape(SLOTS, blocks)
        self.table.tokens[:] = rng.integers(0, VOCAB, self.table.tokens.shape)
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(model.config, SLOTS * blocks, BLOCK, dtype, "cpu")
        torch.manual_seed(seed)
        self.cache.all_keys.normal_()
        self.cache.all_values.normal_()
        self.keys, self.values = self.cache.all_keys.clone(), self.cache.all_values.clone()
        self.chains = CpuChains(self.table, self.cache)
        lengths = rng.integers(2, CONTEXT - 12, requests)
        self.batch = BatchView(
            request_ids=np.arange(requests),
            prompt_ids=np.arange(requests),
            slots=rng.permutation(SLOTS)[:requests],
            history=self.table.tokens,
            lengths=lengths,
            prompt_lengths=np.maximum(1, lengths - rng.integers(0, 20, requests)),
            noise_keys=rng.integers(0, 2**62, requests),
            temperatures=rng.choice(np.array([0.0, 0.7, 1.0], np.float32), requests),
            vocab_size=VOCAB,
            top_k=rng.choice([0, 5], requests),
            top_p=rng.choice(np.array([1.0, 0.8], np.float32), requests),
            room=rng.integers(0, 12, requests),
        )

    def draft(self, copy: Transformer, depth: int, *, native: bool) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Tokens, logits and the K/V of the cache afterwards, which is then as before."""
        call = self.chains.chain if native else self.chains.separate_passes
        tokens, logits = call(copy, self.batch, depth, logits=True)
        assert logits is not None
        counts = torch.from_numpy(np.minimum(self.batch.room, depth))
        logits = logits.masked_fill((torch.arange(depth) >= counts[:, None])[..., None], 0)
        found = torch.stack((self.cache.all_keys, self.cache.all_values))
        self.cache.all_keys.copy_(self.keys)
        self.cache.all_values.copy_(self.values)
        return tokens, logits, found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_equal_bits(scene: Scene, copy: Transformer, depth: int) -> None:
    ours, theirs = (scene.draft(copy, depth, native=native) for native in (True, False))
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert torch.equal(bits(ours[1]), bits(theirs[1]))
    assert torch.equal(bits(ours[2]), bits(theirs[2]))
    written = (bits(ours[2]) != bits(torch.stack((scene.keys, scene.values)))).flatten(3).any(3).any(0).any(0)
    wanted = np.zeros(len(written), np.bool_)
    for r, room in enumerate(scene.batch.room):
        first = scene.batch.lengths[r] - 1
        for position in range(first, first + min(room, depth)):
            block = scene.table.block_tables[scene.batch.slots[r], position // BLOCK]
            wanted[block * BLOCK + position % BLOCK] = True
    np.testing.assert_array_equal(written.numpy(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["w4a8", "w8a8"])
def test_the_call_is_the_separate_passes(tmp_path: Path, family: str, dtype: torch.dtype, form: str) -> None:
    model = wide_model(tmp_path, family, dtype)
    copy = low_bit_copy(model, FORMATS[form])
    round_again(copy, model)
    for seed in range(4):
        assert_equal_bits(Scene(model, seed, 1 + seed), copy, 7)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 192}, {"intermediate_size": 320}, {"num_attention_heads": 4, "head_dim": 16}], ids=str
)
def test_matrices_of_one_copy_may_have_groups_of_128_and_of_64(tmp_path: Path, changes: dict[str, int]) -> None:
    model = wide_model(tmp_path, **changes)
    copy = low_bit_copy(model, FORMATS["w4a8"])
    round_again(copy, model)
    stored = [getattr(block, name).stored for block in copy.blocks for name in Block.PROJECTIONS]
    assert {weight.inputs // weight.scales.shape[1] for weight in stored} == {64, 128}
    assert_equal_bits(Scene(model, 3, 4), copy, 7)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Transformer]:
    model = wide_model(tmp_path_factory.mktemp("model"))
    copy = low_bit_copy(model, FORMATS["w4a8"])
    round_again(copy, model)
    return model, copy


@settings(max_examples=40, deadline=None)
@given(
    rooms=st.lists(st.integers(0, 12), min_size=1, max_size=SLOTS),
    depth=st.integers(1, 10),
    seed=st.integers(0, 1000),
    threads=st.sampled_from([1, 2]),
)
def test_whatever_room_each_request_has(
    copied: tuple[Transformer, Transformer], rooms: list[int], depth: int, seed: int, threads: int
) -> None:
    model, copy = copied
    scene = Scene(model, seed, len(rooms))
    scene.batch = replace(scene.batch, room=np.array(rooms))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal_bits(scene, copy, depth)
    finally:
        torch.set_num_threads(before)


def test_a_request_drafts_the_same_alone_and_among_others(copied: tuple[Transformer, Transformer]) -> None:
    model, copy = copied
    scene = Scene(model, 3, SLOTS)
    together, _, _ = scene.draft(copy, 9, native=True)
    for r in range(SLOTS):
        batch = {
            name: getattr(scene.batch, name)[r : r + 1].copy()
            for name in ("slots", "lengths", "prompt_lengths", "noise_keys", "temperatures", "top_k", "top_p", "room")
        }
        alone = Scene(model, 3, SLOTS)
        alone.batch = replace(scene.batch, **batch)
        np.testing.assert_array_equal(alone.draft(copy, 9, native=True)[0][0], together[r])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"slots": np.array([SLOTS])}, "slot 6 is outside"),
        ({"lengths": np.array([CONTEXT + 1])}, "outside the history"),
        ({"lengths": np.array([CONTEXT - 2])}, "behind its block table"),
        ({"room": np.array([-1])}, "count -1 is outside"),
    ],
    ids=str,
)
def test_what_lies_outside_is_refused_before_anything_is_written(
    copied: tuple[Transformer, Transformer], change: dict[str, np.ndarray], complaint: str
) -> None:
    model, copy = copied
    scene = Scene(model, 0, 1)
    scene.batch = replace(scene.batch, **({"room": np.array([9])} | change))
    with pytest.raises(IndexError, match=complaint):
        scene.draft(copy, 9, native=True)
    assert torch.equal(scene.cache.all_keys, scene.keys)


def test_weights_that_are_not_finite_give_some_tokens(copied: tuple[Transformer, Transformer]) -> None:
    model, copy = copied
    scene = Scene(model, 1, 3)
    norm = model.norm.weight.data.clone()
    try:
        model.norm.weight.data.fill_(float("nan"))
        tokens, _, _ = scene.draft(copy, 5, native=True)
    finally:
        model.norm.weight.data.copy_(norm)
    assert ((tokens >= -1) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["w4a8", "w8a8", "w3a8", "w2a8"])
@pytest.mark.parametrize("shape", [(48, 256), (51, 128), (7, 384), (33, 192)], ids=str)
def test_rounding_in_one_pass_gives_the_panels_of_quantise(
    dtype: torch.dtype, form: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    weight[3], weight[4, :128], weight[5] = 0, weight[4, :128].abs(), 0.5
    expected = quantise(weight, FORMATS[form])
    into = quantise(torch.randn(shape).to(dtype), FORMATS[form])
    place = low_bit_panels(into).data_ptr()
    requantise(weight, into)
    ours = low_bit_panels(into).clone()
    for part, wanted in zip(into.parts, expected.parts, strict=True):
        part.copy_(wanted)
    assert torch.equal(ours, low_bit_panels(into))  # packed into the same memory: bytes that nobody writes are equal
    requantise(weight, into)
    assert low_bit_panels(into).data_ptr() == place
    x = torch.randn(3, shape[1]).to(dtype)
    assert torch.equal(low_bit_linear(x, into), low_bit_linear(x, expected))


def test_rounding_without_the_kernel_gives_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    expected, into = quantise(weight, FORMATS["w4a8"]), quantise(torch.randn(16, 128), FORMATS["w4a8"])
    monkeypatch.delattr(kernels, "quantise_pack")
    requantise(weight, into)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(into.parts, expected.parts, strict=True))


def test_a_copy_shares_what_it_does_not_round_and_counts_the_rest(tmp_path: Path) -> None:
    model = wide_model(tmp_path, "qwen2")
    copy = low_bit_copy(model, FORMATS["w4a8"])
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in copy.parameters()} <= shared
    assert all(buffer.device.type == "cpu" for buffer in copy.buffers())
    layer = (128 * (8 + 2 * 2) * 16 + 8 * 16 * 128 + 3 * 128 * 256) * (0.5 + 5 / 128)
    assert copy_bytes(copy) == 2 * layer


def test_a_head_that_is_large_beside_the_layers_is_read_in_eight_bits(tmp_path: Path) -> None:
    small, large = (wide_model(tmp_path / str(size), vocab_size=size) for size in (VOCAB, 640))
    form = FORMATS["w4a8"]
    assert head_format(small, form) is None
    assert head_format(large, form) is FORMATS["w8a8"]
    assert head_format(large, FORMATS["w4a16"]) is None
    copy = low_bit_copy(large, form)
    round_again(copy, large)
    assert isinstance(copy.lm_head, LowBitProjection)
    x = torch.randn(2, 128)
    assert torch.equal(copy.logits(x), low_bit_linear(x, quantise(large.head_weight, FORMATS["w8a8"])))
    layers = sum(p.numel() for block in large.blocks for p in block.parameters() if p.ndim == 2) // 2
    assert large.head_weight.nbytes > LARGEST_HEAD * layers
    scene = Scene(large, 2, 4)
    scene.batch = replace(scene.batch, vocab_size=640)
    assert_equal_bits(scene, copy, 6)
