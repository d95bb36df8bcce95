"""Where a step's arrays lie on a device; what its forward computes (the kernels' oracles, on CPU) and launches (on
meta tensors)."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engine.batch.step.types import StepRows
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.decoder import DecoderForward
from actors.engine.native.forward.device_steps import DeviceSteps, reference_forward
from actors.engine.native.forward.layout import RESERVED_BLOCKS, DeviceStep, StepLayout, StepShape
from models.checkpoint import save_model
from models.config import ModelConfig
from models.ops.triton import LAUNCHES
from models.packed import PackedContext
from models.staging import Upload
from models.tensor_parallel import RankGroup, load_rank
from models.transformer import Transformer
from tests.engine.support import (
    FAMILIES,
    hf_config,
    tiny_model,
)
from tests.models.ranks import on_ranks

SIZE, BLOCKS = 8, 40
TRASH = BLOCKS * SIZE
CPU = torch.device("cpu")


def a_step(counts: list[int], before: list[int], seed: int, *, tree: bool = False, truncated: bool = False) -> StepRows:
    """Ragged requests with random chains or trees, every row drawn from."""
    rng = np.random.default_rng(seed)
    contexts = np.array(counts) + np.array(before)
    taken = rng.permutation(BLOCKS)
    blocks = [[int(taken[i]) for i in range(-(-int(c) // SIZE))] for c in contexts]
    given = iter(taken)
    blocks = [[int(next(given)) for _ in own] for own in blocks]
    table = np.zeros((len(counts), max(len(b) for b in blocks)), np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    offsets = np.zeros(len(counts) + 1, np.int32)
    offsets[1:] = np.cumsum(counts)
    rows, most = int(offsets[-1]), max(counts)
    places = np.concatenate([b + np.arange(c) for b, c in zip(before, counts, strict=True)])
    owner = np.arange(len(counts)).repeat(counts)
    arrays: dict[str, Any] = {
        "tokens": rng.integers(0, 50, rows),
        "positions": places,
        "kv_slots": table[owner, places // SIZE].astype(np.int64) * SIZE + places % SIZE,
        "query_offsets": offsets,
        "context_lens": contexts.astype(np.int32),
        "block_tables": table,
        "noise_keys": rng.integers(1, 2**62, rows),
        "noise_positions": rng.integers(0, 99, rows),
        "temperature": rng.random(rows).astype(np.float32),
    }
    if truncated:
        arrays |= {"top_k": rng.integers(1, 9, rows), "top_p": rng.random(rows).astype(np.float32)}
    if tree:
        mask = np.zeros((rows, most), np.uint8)
        for r, count in enumerate(counts):
            reached: Any = mask[offsets[r] :]
            reached[0, 0] = 1
            for i in range(1, count):
                reached[i] = reached[rng.integers(0, i)]
                reached[i, i] = 1
        arrays["tree_mask"] = mask
    return StepRows(arrays, most, int(contexts.max()), rows, truncated)


def shape_of(step: StepRows, *, requests: int = 0, rows: int = 0, blocks: int = 0, mask: int = 0) -> StepShape:
    """Of a graph that holds the step with so much to spare."""
    exact = StepShape.of(step, SIZE)
    total = exact.rows + rows
    return StepShape(
        requests=exact.requests + requests,
        rows=total,
        draws=total,
        blocks=exact.blocks + blocks,
        most=exact.most,
        max_context=(exact.blocks + blocks) * SIZE,
        mask_width=exact.mask_width + mask if exact.mask_width else 0,
        truncated=exact.truncated,
    )


def on_device(step: StepRows, shape: StepShape, upload: Upload | None = None) -> tuple[DeviceStep, int]:
    """The step's tensors, and how many bytes were copied for them."""
    layout = StepLayout(shape, TRASH, SIZE)
    upload = upload or Upload(layout.size_bytes, CPU)
    used = layout.write(layout.host(upload.hosts[upload.begin()]), step)
    upload.send(used)
    return layout.device(upload.device), used


requests_st = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(requests_st, st.integers(0, 3), st.integers(0, 7), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_layout_holds_the_step_and_rows_of_nobody(
    requests: list[tuple[int, int]], more: int, rows: int, blocks: int, tree: bool, truncated: bool
) -> None:
    step = a_step([c for c, _ in requests], [b for _, b in requests], 3, tree=tree, truncated=truncated)
    layout = StepLayout(shape_of(step, requests=more, rows=rows, blocks=blocks, mask=2), TRASH, SIZE)
    upload = Upload(layout.size_bytes, CPU)
    for host in upload.hosts:
        host[:] = 0xAB  # what an earlier, larger step left
    found, used = on_device(step, layout.shape, upload)
    arrays, real, count = step.arrays, step.sampled, len(requests)
    for name, array in arrays.items():
        tensor = getattr(found, name)
        part = tensor[tuple(slice(0, size) for size in array.shape)]
        np.testing.assert_array_equal(part.numpy(), array, err_msg=name)
    assert (found.query_offsets[count:] == real).all(), "requests without rows"
    assert (found.context_lens[count:] == 0).all()
    assert (found.kv_slots[real:] >= TRASH).all()
    assert (found.kv_slots[real:] < TRASH + SIZE).all()
    assert not found.temperature[real:].any()
    assert not found.tokens[real:].any()
    if truncated:
        assert found.top_p is not None
        assert (found.top_p[real:] == 1).all()
    width = arrays["block_tables"].shape[1]
    assert used == layout.size_bytes - aligned_tables(layout.shape) + width * layout.shape.requests * 4


def aligned_tables(shape: StepShape) -> int:
    return -(-shape.blocks * shape.requests * 4 // 64) * 64


def test_a_step_copies_what_it_uses_and_no_more() -> None:
    """Where contexts may be long and batches large, a small step is small (C9: it was the whole capacity)."""
    step = a_step([1], [9], 0)
    shape = StepShape(requests=1, rows=1, draws=1, blocks=2048, most=1, max_context=2048 * SIZE)
    _, used = on_device(step, shape)
    assert used < 64 * 10
    assert StepLayout(shape, TRASH, SIZE).size_bytes > 8192


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [False, True])
def test_rows_of_nobody_change_no_bit_of_a_real_row(tmp_path: Path, family: str, tree: bool) -> None:
    """The same requests alone and in graphs with more requests, more rows, wider tables; K/V outside of the contexts is
    NaN, and nothing but the trash block is written beside the rows' own slots."""
    model = tiny_model(tmp_path, family)
    step = a_step([4, 2, 1], [13, 0, 22], 3, tree=tree)
    slots = step.arrays["kv_slots"]
    used = np.zeros((BLOCKS + RESERVED_BLOCKS) * SIZE, np.bool_)
    for row, context in zip(step.arrays["block_tables"], step.arrays["context_lens"], strict=True):
        used[[int(row[p // SIZE]) * SIZE + p % SIZE for p in range(context)]] = True

    def computed(shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(9)
        cache = KVCache(model.config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.float32, "cpu")
        for tensor in (cache.all_keys, cache.all_values):
            tensor.normal_(generator=generator)
            tensor[:, ~torch.from_numpy(used)] = torch.nan
        before = cache.all_keys.clone()
        with torch.inference_mode():
            rows, hidden = DecoderForward(model)(on_device(step, shape)[0], cache)
            logits = model.logits(hidden)[: step.sampled]
        same = ((cache.all_keys == before) | cache.all_keys.isnan()).all(-1).all(-1).all(0).numpy()
        assert set(np.flatnonzero(~same)) <= {*slots.tolist(), *range(TRASH, TRASH + SIZE)}
        return rows[: step.sampled], logits

    expected = computed(shape_of(step))
    assert not expected[1].isnan().any()
    for spare in ({"requests": 1}, {"rows": 5}, {"requests": 4, "rows": 9, "blocks": 3, "mask": 2}):
        for found, value in zip(computed(shape_of(step, **spare)), expected, strict=True):
            assert torch.equal(found, value), spare


def test_the_forward_by_kernels_of_a_rank_is_its_models(tmp_path: Path) -> None:
    """Sums over ranks included: on every rank, to the bit."""
    save_model(tiny_model(tmp_path), tmp_path / "hf")
    step = a_step([4, 2, 1], [0, 0, 0], 3)

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_rank(tmp_path / "hf", group)
        assert DecoderForward.supports(model)
        hidden = []
        for forward in (DecoderForward(model), partial(reference_forward, model, ())):
            cache = KVCache(model.config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.float32, "cpu")
            hidden.append(forward(on_device(step, shape_of(step))[0], cache)[1])
        return hidden[0], hidden[1]

    (first, expected), (second, _) = on_ranks(2, work)
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recorded", [(), (0,), (0, 1, 1)])
def test_the_forward_by_kernels_is_the_models(tmp_path: Path, family: str, recorded: tuple[int, ...]) -> None:
    """Against the learner's packed pass: a prompt at once, then rows behind it; recorded layers in their places."""
    model = tiny_model(tmp_path, family)
    tokens = torch.randint(0, 50, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens, PackedContext.from_lengths([21]), recorded)
        cache = KVCache(model.config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.float32, "cpu")
        found = []
        for first, count in ((0, 16), (16, 4), (20, 1)):
            step = a_step([count], [first], 5)
            table = np.arange(len(step.arrays["block_tables"][0]), dtype=np.int32)[None]
            places = np.arange(first, first + count)
            arrays = dict(step.arrays) | {"tokens": tokens.numpy()[places], "kv_slots": places, "block_tables": table}
            step = StepRows(arrays, count, first + count, count, False)
            rows, hidden = DecoderForward(model, recorded)(on_device(step, shape_of(step))[0], cache)
            found.append(rows)
            assert torch.equal(hidden, rows[:, -model.config.hidden_size :])
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


# What a graph holds, on meta tensors.


class OnDevice(TorchDispatchMode):
    """Every operation reads and makes tensors of the `meta` device, of shapes that do not depend on values. Counts
    kernels and the elements of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, f"{func} touches the host"
        if func.namespace == "paceline":
            self.kernels += LAUNCHES[func._schema.name.split("::")[1]]
        elif not _is_view(func):
            self.kernels += 1
        if not _is_view(func):
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.largest = max(self.largest, *sizes, 0)
        return out


def _is_view(func: Any) -> bool:
    """Launches nothing: a view, or memory."""
    returns = func._schema.returns
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return views or "empty" in func._schema.name


def on_meta(config: ModelConfig, **settings: Any) -> tuple[Transformer, DeviceSteps]:
    """Steps of a model without values, of 4 requests."""
    model = Transformer(config, dtype=torch.bfloat16, device="meta", batch_invariant=settings.pop("invariant", False))
    cache = KVCache(config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.bfloat16, "meta")
    settings = {"recorded": (), "keep_rows": False, "rejection": False, "graph_capture": None} | settings
    steps = DeviceSteps(model, cache, slots=4, blocks=6, trash_slot=TRASH, **settings)
    steps.resize(64, 17)
    return model, steps


def meta_step(shape: StepShape) -> DeviceStep:
    layout = StepLayout(shape, TRASH, SIZE)
    return layout.device(torch.empty(layout.size_bytes, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_never_touches_the_host_and_keeps_its_budget(family: str, width: int, invariant: bool) -> None:
    """At most 12 kernels a layer and 3 a draw (C1: 52 and 187); on tensors without values: anything that must wait for
    the device, or copies between host and device, which a capture forbids, raises."""
    counts = []
    for layers in (2, 4):
        config = ModelConfig.from_hf(hf_config(family, num_hidden_layers=layers))
        model, steps = on_meta(config, invariant=invariant)
        rows = 4 * width
        step = meta_step(
            StepShape(requests=4, rows=rows, draws=rows, blocks=6, most=width, max_context=48, mask_width=width)
        )
        logits = torch.empty(rows, config.vocab_size, device="meta")
        with torch.inference_mode():
            model.rope.table(step.tokens.device)
            with OnDevice() as whole:
                steps._replayed(step)
            with OnDevice() as draw:
                steps._draw(logits, step)
        counts.append(whole.kernels)
        assert draw.kernels <= 3
    per_layer = (counts[1] - counts[0]) / 2
    assert per_layer == 10
    assert counts[0] == 2 * 10 + 3 + 3, "embedding, first norm, head and the draw"
    some = torch.empty(3, device="meta")
    with OnDevice():  # which does see such things
        for synchronising in (some.sum().item, some.nonzero, lambda: some + torch.ones(3)):
            with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
                synchronising()


def test_a_mixed_step_pads_and_gathers_nothing() -> None:
    """Prompt rows beside decoding, long contexts (B2: every request was padded to the widest, K/V were copied three
    times): no tensor is larger than the projections of the rows there are."""
    config = ModelConfig.from_hf(hf_config("qwen2", max_position_embeddings=8192))
    model = Transformer(config, dtype=torch.bfloat16, device="meta", batch_invariant=False)
    requests, prompt, blocks = 128, 512, 8192 // SIZE
    cache = KVCache(config, requests * blocks, SIZE, torch.bfloat16, "meta")
    rows = requests - 1 + prompt
    shape = StepShape(
        requests=requests, rows=rows, draws=requests, blocks=blocks, most=prompt, max_context=8192, picked=True
    )
    with torch.inference_mode():
        model.rope.table(torch.device("meta"))
        with OnDevice() as counted:
            DecoderForward(model)(meta_step(shape), cache)
    assert counted.largest <= rows * max(2 * config.intermediate_size, config.query_size + 2 * config.kv_size)
