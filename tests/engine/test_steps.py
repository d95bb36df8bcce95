"""The array work of steps: by definition, and native and numpy alike; the engine is the same with either."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.reference import NumpySteps
from actors.engine.batch.step.types import StepDrafts
from actors.engine.native import engine as engine_module
from models.ops.native import kernels
from tests.engine.support import FAMILIES, Counted, assert_same, engine, make_requests, run, tiny_model
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees

BLOCK, VOCAB = 4, 5
NATIVE = hasattr(kernels, "StepKernels")
needs_native = pytest.mark.skipif(not NATIVE, reason="paceline_native is not installed: pip install -e .")


def made(table: SlotTable, native: bool) -> StepArrays:
    if not native:
        return NumpySteps(table, BLOCK)
    from actors.engine.batch.step.kernels import NativeSteps

    steps = NativeSteps(table, BLOCK)
    steps.resize(400, 4000)
    return steps


def a_table(rng: np.random.Generator, slots: int) -> SlotTable:
    """Slots in the middle of decoding, of any lengths, with blocks for every known token and some for drafts."""
    table = SlotTable(slots, 64, 16)
    table.tokens[:] = rng.integers(0, VOCAB, table.tokens.shape)
    table.prompt_length[:] = rng.integers(1, 20, slots)
    table.noise_origin[:] = rng.integers(0, table.prompt_length + 1)
    table.length[:] = table.prompt_length + rng.integers(0, 12, slots)
    table.computed[:] = table.length - 1
    table.limit[:] = table.length + rng.integers(1, 20, slots)
    table.reported[:] = table.prompt_length
    table.block_counts[:] = -(-table.length // BLOCK) + rng.integers(0, 3, slots)
    table.block_tables[:] = rng.permutation(slots * 16).reshape(slots, 16)
    table.noise_key[:] = rng.integers(0, 2**60, slots)
    table.temperature[:] = rng.random(slots)
    if rng.random() < 0.5:
        table.top_k[:] = rng.integers(0, 3, slots)
        table.top_p[:] = rng.choice([0.5, 1.0], slots)
    table.stop = rng.integers(-1, VOCAB, (slots, 2))
    return table


def a_copy(table: SlotTable) -> SlotTable:
    copy = SlotTable(*table.tokens.shape, table.block_tables.shape[1])
    for name, value in vars(table).items():
        setattr(copy, name, deepcopy(value))
    return copy


def same(a: object, b: object) -> None:
    assert (a is None) == (b is None)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist()
    elif a is not None:
        assert a == b


DRAFTED = st.tuples(st.integers(-1, VOCAB), st.integers(-2, 7))  # (token, parent)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
@given(
    st.lists(st.lists(DRAFTED, max_size=8), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_clean_drafts_are_what_is_usable_in_front(
    native: bool, drafts: list[list[tuple[int, int]]], depth: int, most: int, tree: bool, seed: int
) -> None:
    requests, width = len(drafts), max(len(row) for row in drafts)
    tokens, parents = np.zeros((requests, width), np.int64), np.full((requests, width), -1)
    for r, row in enumerate(drafts):
        for i, (token, parent) in enumerate(row):
            tokens[r, i], parents[r, i] = token, parent
    table = a_table(np.random.default_rng(seed), requests + 1)
    slots = np.random.default_rng(seed).permutation(requests + 1)[:requests]
    counts = np.array([len(row) for row in drafts])
    found = made(table, native).clean(slots, tokens, counts, parents if tree else None, depth, most, VOCAB)
    usable: list[list[tuple[int, int]]] = []
    short = False
    for r, row in enumerate(drafts):
        kept: list[tuple[int, int]] = []
        levels: list[int] = []
        for i, (token, given_parent) in enumerate(
            row[: min(most, int(table.limit[slots[r]] - table.length[slots[r]] - 1))]
        ):
            parent = given_parent if tree else i - 1
            if not (0 <= token < VOCAB and -1 <= parent < i) or (token, parent) in kept:
                break
            level = 1 + (levels[parent] if parent >= 0 else 0)
            if level > depth:
                break
            kept.append((token, parent))
            levels.append(level)
        usable.append(kept)
        length = int(table.length[slots[r]])
        short |= length + len(kept) > table.block_counts[slots[r]] * BLOCK
        if found is not None:
            step = found[0]
            assert int(step.counts[r]) == len(kept)
            assert step.tokens[r].tolist() == [t for t, _ in kept] + [-1] * (step.tokens.shape[1] - len(kept))
            assert table.tokens[slots[r], length : length + len(kept)].tolist() == [t for t, _ in kept]
            if tree:
                assert step.parents is not None
                assert step.depths is not None
                assert step.parents[r, : len(kept)].tolist() == [p for _, p in kept]
                assert step.depths[r].tolist() == levels + [0] * (step.tokens.shape[1] - len(kept))
                assert step.reached[r] == max(levels, default=0)
    assert (found is not None) == any(usable)
    if found is not None:
        assert found[1] == short
        assert found[0].drafted == sum(map(len, usable))


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_drafts_that_make_no_sense_are_none(native: bool) -> None:
    steps = made(a_table(np.random.default_rng(0), 3), native)
    slots, ones, three = np.arange(3), np.ones((3, 4), np.int64), np.full(3, 2)
    for tokens, counts, parents in (
        (np.ones((2, 4), np.int64), three, None),
        (np.ones((3, 4, 1), np.int64), three, None),
        (ones * 0.5, three, None),
        (ones, three[:2], None),
        (ones, three * 0.5, None),
        (ones[:, :0], three, None),
        (ones, three, ones[:, :2]),
        (ones, three, ones[:2]),
        (ones, three, ones * 0.5),
        ("text", three, None),
    ):
        assert steps.clean(slots, tokens, counts, parents, 4, 4, VOCAB) is None


def a_step(rng: np.random.Generator, table: SlotTable) -> tuple[StepPlan, StepDrafts | None]:
    """Decoding, chunks beside it, chains or trees."""
    slots = rng.permutation(len(table.length))[: rng.integers(1, len(table.length) + 1)]
    rows = np.ones(len(slots), np.int64)
    samples = np.ones(len(slots), np.bool_)
    kind, width = rng.integers(4), int(rng.integers(1, 7))
    if kind == 3:  # Some are in their prompts, some of these reach its end.
        for i in np.flatnonzero(rng.random(len(slots)) < 0.5):
            table.length[slots[i]] = table.prompt_length[slots[i]]
            table.computed[slots[i]] = rng.integers(0, table.length[slots[i]])
            rows[i] = rng.integers(1, table.length[slots[i]] - table.computed[slots[i]] + 1)
        samples = table.computed[slots] + rows == table.length[slots]
    plan = StepPlan(slots, rows, samples, [], int(rows[rows > 1].sum()))
    if kind == 0:
        return plan, None
    decoding = samples & (rows == 1)
    counts = np.where(decoding, rng.integers(0, width + 1, len(slots)), 0)
    counts = np.minimum(counts, np.maximum(table.limit[slots] - table.length[slots] - 1, 0))
    tokens = np.where(np.arange(width) < counts[:, None], rng.integers(0, VOCAB, (len(slots), width)), -1)
    for slot, row, count in zip(slots, tokens, counts, strict=True):
        table.tokens[slot, table.length[slot] : table.length[slot] + count] = row[:count]
    if kind != 2:
        return plan, StepDrafts(counts=counts, tokens=tokens[samples], drafted=int(counts.sum()))
    parents, depths = np.full_like(tokens, -1), np.zeros_like(tokens)
    for r, drafted in enumerate(counts.tolist()):
        for node in range(drafted):
            parents[r, node] = rng.integers(-1, node)
            depths[r, node] = 1 if parents[r, node] < 0 else depths[r, parents[r, node]] + 1
    return plan, StepDrafts(counts=counts, tokens=tokens, parents=parents, depths=depths, drafted=int(counts.sum()))


@needs_native
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=400, deadline=None)
def test_native_and_numpy_make_and_settle_the_same_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = a_table(rng, int(rng.integers(1, 7)))
    plan, drafts = a_step(rng, table)
    tables = table, a_copy(table)
    both = made(tables[0], True), made(tables[1], False)
    rows = [steps.rows(plan, drafts) for steps in both]
    for name in ("most", "max_context", "sampled"):
        same(getattr(rows[0], name), getattr(rows[1], name))
    if rows[0].sampled:
        assert rows[0].truncated == rows[1].truncated
    assert rows[0].arrays.keys() == rows[1].arrays.keys()
    for name, array in rows[0].arrays.items():
        same(array, rows[1].arrays[name])
    draws = rng.integers(0, VOCAB, rows[0].sampled)
    logprobs = rng.random((2, rows[0].sampled)).astype(np.float32)
    every = int(rng.integers(1, 10))
    settled = [steps.settle(plan, draws, logprobs[0], logprobs[1], drafts, every) for steps in both]
    for name in ("new_tokens", "ended", "due", "accepted_tokens"):
        same(getattr(settled[0], name), getattr(settled[1], name))
    if drafts is not None and rows[0].sampled:
        same(settled[0].emitted, settled[1].emitted)
        same(settled[0].accepted, settled[1].accepted)
        assert settled[0].emitted is not None
        assert settled[0].new_tokens == settled[0].emitted.sum()
        if drafts.parents is not None:
            same(settled[0].moves, settled[1].moves)
            for r, count in enumerate(settled[0].emitted):
                ways: Any = [each.path for each in settled]
                assert ways[0][r, :count].tolist() == ways[1][r, :count].tolist()
    for name, value in vars(tables[0]).items():
        same(value, getattr(tables[1], name))


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_without_the_native_steps_draws_the_same(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(14, prompts=5, seed=61, top_p=0.95, stop_token_ids=(3,))
    expected = run(engine(model), requests)
    monkeypatch.setattr(engine_module, "step_arrays", NumpySteps)
    assert_same(run(engine(model), requests), expected)
    assert_same(Counted(model, Oracle(expected, spoil=True), "test:5", kv_tokens=256).run(requests), expected)
    trees = Counted(model, RandomTrees(expected, 0.7), "test:4x3/12", prefill_chunk_tokens=16)
    assert_same(trees.run(requests), expected)
    assert trees.accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_in_torch_alone_tokens_are_the_same_too(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extension logits differ from batch to batch by rounding, which these sharp models bear."""
    monkeypatch.setattr("models.ops.native.kernels", None)
    monkeypatch.setattr("actors.engine.native.forward.context.kernels", None)
    monkeypatch.setattr(engine_module, "step_arrays", NumpySteps)
    model = tiny_model(tmp_path, family)
    requests = make_requests(10, prompts=4, seed=62, temperature=0.7, stop_token_ids=(3,))
    expected = run(engine(model), requests)
    for drafter, strategy in ((Oracle(expected, spoil=True), "test:5"), (RandomTrees(expected, 0.7), "test:4x3/12")):
        counted = Counted(model, drafter, strategy)
        results = counted.run(requests)
        assert counted.accepted > 0
        for request_id, rollout in expected.items():
            assert results[request_id].tokens.tolist() == rollout.tokens.tolist()
            np.testing.assert_allclose(results[request_id].logprobs, rollout.logprobs, atol=1e-3)


@needs_native
def test_the_native_kernels_refuse_what_does_not_fit() -> None:
    table = a_table(np.random.default_rng(0), 3)
    steps = made(table, True)
    ones, yes = np.ones(1, np.int64), np.ones(1, np.bool_)
    with pytest.raises(ValueError, match="slot out of range"):
        steps.rows(StepPlan(np.array([3]), ones, yes), None)
    with pytest.raises(ValueError, match="dtype"):
        steps.rows(StepPlan(np.array([1], np.int32), ones, yes), None)
    with pytest.raises(ValueError, match="counts out of range"):
        steps.rows(
            StepPlan(np.array([1]), ones, yes), StepDrafts(counts=np.array([3]), tokens=np.ones((1, 2), np.int64))
        )
    plan = StepPlan(np.array([0]), ones, yes)
    with pytest.raises(ValueError, match="fewer draws"):
        steps.settle(plan, np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), None, 9)
