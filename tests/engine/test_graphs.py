"""Graphed steps without a GPU: padding, static attention, and an engine whose graphs are recorded by a fake.

The fake's replay is the recorded computation over the tensors it was recorded with: a graph that would read anything
else than what stays in place on CUDA gives other tokens here too.
"""

from collections.abc import Callable
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

from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward import runner as runner_module
from actors.engine.native.forward.buffers import StepBuffers
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.graph_rows import RESERVED_BLOCKS, ZERO, padded_rows, reserved_block
from actors.engine.native.forward.graphs import GraphedForward, _StaticContext
from models import weights
from models.checkpoint import hf_state_dict
from models.config import ModelConfig
from models.ops import reference
from models.ops.static_attention import StaticPages
from models.transformer import Transformer
from policies.speculation.graph_plan import CapturePlan, GraphShape
from policies.speculation.policy import FixedPolicy
from policies.speculation.strategy import PLAIN, Strategy
from tests.engine.support import (
    FAMILIES,
    drain,
    engine,
    hf_config,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
)
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees

SIZE, BLOCKS = 8, 40


class FakeGraphCapture:
    """Records nothing: computes again, on the same tensors."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.records = self.replays = self.resets = 0
        self._fail_at = fail_at

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        if self.records == self._fail_at:
            raise RuntimeError("CUDA out of memory, said the fake")
        compute()

        def replay() -> None:
            self.replays += 1
            compute()

        return replay

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step buffers that stay in place, as on CUDA."""
    monkeypatch.setattr(runner_module, "StepBuffers", partial(StepBuffers, staged=True))


# Static attention.


def a_batch(counts: list[int], before: list[int], width: int, seed: int, tree: bool) -> dict[str, Any]:
    """Ragged requests with random trees (or chains) over a random cache."""
    rng = np.random.default_rng(seed)
    requests, contexts = len(counts), np.array(counts) + np.array(before)
    blocks = [rng.permutation(BLOCKS)[: -(-int(c) // SIZE)] for c in contexts]
    table = np.zeros((requests, max(len(b) for b in blocks)), np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    offsets = np.zeros(requests + 1, np.int32)
    offsets[1:] = np.cumsum(counts)
    rows = int(offsets[-1])
    arrays: dict[str, Any] = {
        "tokens": rng.integers(0, 50, rows),
        "positions": np.concatenate([b + np.arange(c) for b, c in zip(before, counts, strict=True)]),
        "query_offsets": offsets,
        "context_lens": contexts.astype(np.int32),
        "block_tables": table,
    }
    places = arrays["positions"]
    owner = np.arange(requests).repeat(counts)
    arrays["kv_slots"] = table[owner, places // SIZE].astype(np.int64) * SIZE + places % SIZE
    if tree:
        mask = np.zeros((rows, width), np.uint8)
        for r, count in enumerate(counts):
            reached: Any = mask[offsets[r] :]
            reached[0, 0] = 1
            for i in range(1, count):
                reached[i] = reached[rng.integers(0, i)]
                reached[i, i] = 1
        arrays["tree_mask"] = mask
    return arrays


def tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def pages_of(step: dict[str, torch.Tensor], graph: GraphShape, groups: int) -> StaticPages:
    return StaticPages.of(
        step["block_tables"],
        step["query_offsets"].diff(),
        step["context_lens"],
        step.get("tree_mask"),
        rows=graph.rows,
        groups=groups,
        block_tokens=SIZE,
        zero_slot=reserved_block(BLOCKS, ZERO) * SIZE,
        dtype=torch.float32,
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_static_attention_is_the_reference(
    requests: list[tuple[int, int]], more_requests: int, more_rows: int, seed: int, tree: bool
) -> None:
    """Also where every slot outside of the contexts holds NaN."""
    counts, before = [c for c, _ in requests], [b for _, b in requests]
    arrays = a_batch(counts, before, max(counts), seed, tree)
    generator = torch.Generator().manual_seed(seed)
    cache = [torch.randn((BLOCKS + RESERVED_BLOCKS) * SIZE, 2, 8, generator=generator) for _ in range(2)]
    used = torch.zeros(len(cache[0]), dtype=torch.bool)
    for row, context in zip(arrays["block_tables"], arrays["context_lens"], strict=True):
        used[[int(row[p // SIZE]) * SIZE + p % SIZE for p in range(context)]] = True
    for tensor in cache:
        tensor[~used] = torch.nan
        tensor[reserved_block(BLOCKS, ZERO) * SIZE :] = 0.0
    rows = sum(counts)
    q = torch.randn(rows, 4, 8, generator=generator)
    step = tensors(arrays)
    expected = reference.paged_attention(
        q,
        cache[0],
        cache[1],
        step["block_tables"],
        step["query_offsets"],
        step["context_lens"],
        SIZE,
        0.3,
        tree_mask=step.get("tree_mask"),
    )
    graph = GraphShape("target", len(counts) + more_requests, max(counts) + more_rows)
    padded = tensors(padded_rows(arrays, graph, 48, SIZE, BLOCKS))
    real = padded.get("sample_rows", torch.arange(rows))
    wide = torch.zeros(graph.total_rows, 4, 8)
    wide[real] = q
    found = pages_of(padded, graph, groups=2).attend(wide, cache[0], cache[1], 0.3)
    torch.testing.assert_close(found[real], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [False, True])
def test_padding_changes_no_bit_of_a_real_row(tmp_path: Path, family: str, tree: bool) -> None:
    """The same requests in a graph of their size and in larger ones: more requests, more rows, or both."""
    model = tiny_model(tmp_path, family)
    counts, before = [4, 2, 1], [13, 0, 22]
    arrays = a_batch(counts, before, 4, 3, tree)

    def hidden(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        graph = GraphShape("target", batch, width)
        generator = torch.Generator().manual_seed(9)
        cache = KVCache(model.config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.float32, "cpu")
        cache.all_keys[:, : BLOCKS * SIZE].normal_(generator=generator)
        cache.all_values[:, : BLOCKS * SIZE].normal_(generator=generator)
        step = tensors(padded_rows(arrays, graph, 48, SIZE, BLOCKS))
        context = _StaticContext(cache, step["positions"], step["kv_slots"], pages_of(step, graph, 2))
        with torch.inference_mode():
            out = model(step["tokens"], context)
            out, logits = out[step["sample_rows"]], model.logits(out)[step["sample_rows"]]
        assert not cache.all_keys[:, reserved_block(BLOCKS, ZERO) * SIZE :].any(), "the zero block was written"
        return out, logits

    expected = hidden(3, 4)
    for batch, width in ((4, 4), (8, 4), (3, 7), (6, 9)):
        for found, value in zip(hidden(batch, width), expected, strict=True):
            if width == 4:
                assert torch.equal(found, value), (batch, width)
            else:  # BLAS inside torch's attention may pick another kernel for more rows of a request
                torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-5)


class DeviceOnly(TorchDispatchMode):
    """Every operation reads and makes tensors of the `meta` device, of shapes that do not depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, f"{func} touches the host"
        self.operations += 1
        return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_captured_never_touches_the_host(family: str, width: int, invariant: bool) -> None:
    """On tensors without values: anything that must wait for the device, or copies between host and device, which a
    capture forbids, raises."""
    config, device, graph = ModelConfig.from_hf(hf_config(family)), "meta", GraphShape("target", 4, width)
    guard = DeviceOnly()

    class Guarded(FakeGraphCapture):
        def record(self, compute: Callable[[], None]) -> Callable[[], None]:
            compute()  # the warm-up may do what happens once
            with guard:
                compute()
            return compute

    with torch.inference_mode():
        model = Transformer(config, dtype=torch.bfloat16, device=device, batch_invariant=invariant)
        cache = KVCache(config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.bfloat16, device)
        graphs = GraphedForward(model, BLOCKS, CapturePlan((graph,)), (48,), Guarded())
        rows = graph.total_rows
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "tokens": ((rows,), torch.int64),
            "positions": ((rows,), torch.int64),
            "kv_slots": ((rows,), torch.int64),
            "query_offsets": ((graph.batch + 1,), torch.int32),
            "context_lens": ((graph.batch,), torch.int32),
            "block_tables": ((graph.batch, 48 // SIZE), torch.int32),
        }
        if width > 1:
            shapes["tree_mask"] = ((rows, width), torch.uint8)
        step = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        assert graphs._capture(graph, 48, step, cache) is not None
    assert guard.operations > 20 * config.num_layers
    some = torch.empty(3, device=device)
    with guard:  # which does see such things
        for synchronising in (some.sum().item, some.nonzero, lambda: some + torch.ones(3)):
            with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
                synchronising()


# The engine.


def graphed(
    model: Transformer, graph_capture: FakeGraphCapture, strategy: str = "plain", **keywords: Any
) -> NativeEngine:
    options = {k: keywords.pop(k) for k in ("prefill_chunk_tokens", "kv_tokens") if k in keywords}
    policy = None if strategy == "plain" else FixedPolicy(Strategy.parse(strategy))
    return NativeEngine(model, options_of(**options), policy=policy, graph_capture=graph_capture, **keywords)


def assert_same_tokens(actual: dict[int, Any], expected: dict[int, Any]) -> None:
    assert actual.keys() == expected.keys()
    for request_id, rollout in expected.items():
        assert actual[request_id].tokens.tolist() == rollout.tokens.tolist(), request_id
        np.testing.assert_allclose(actual[request_id].logprobs, rollout.logprobs, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9}])
def test_tokens_are_those_of_eager_steps(tmp_path: Path, family: str, sampling: dict[str, Any]) -> None:
    """Plain decoding, ragged chains and trees; requests come and go, prompts in chunks run eagerly between."""
    model = tiny_model(tmp_path, family)
    requests = make_requests(14, prompts=5, seed=71, stop_token_ids=(3,), **sampling)
    expected = run(engine(model), requests)
    drafters: dict[str, dict[str, Any]] = {"plain": {}, "test:5": {"test": Oracle(expected, spoil=True)}}
    drafters["test:4x3/12"] = {"test": RandomTrees(expected, 0.7)}
    for strategy, drafter in drafters.items():
        graph_capture = FakeGraphCapture()
        core = graphed(model, graph_capture, strategy, drafters=drafter, prefill_chunk_tokens=16)
        assert_same_tokens(run(core, requests), expected)
        assert graph_capture.replays > graph_capture.records > 0, "graphs were used, and used again"


def test_rejection_sampling_over_graphs_is_that_of_eager_steps(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(10, prompts=4, seed=72)
    oracle = run(engine(model), requests)
    results = []
    for graph_capture in (None, FakeGraphCapture()):
        core = NativeEngine(
            model,
            options_of(),
            drafters={"test": Oracle(oracle, spoil=True)},
            policy=FixedPolicy(Strategy.parse("test:5")),
            verification="rejection",
            graph_capture=graph_capture,
        )
        results.append(run(core, requests))
    assert_same_tokens(results[1], results[0])


def test_sleep_weights_and_policies(tmp_path: Path) -> None:
    """A new cache or larger buffers: captured again. New weights in place, a policy with smaller steps: not."""
    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=73, max_new_tokens=12)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture()
    core = graphed(model, graph_capture, drafters={"test": Oracle(expected)})
    assert_same_tokens(run(core, requests), expected)
    first = graph_capture.records
    core.update_weights(*weights.pack(hf_state_dict(tiny_model(tmp_path, seed=5)), version=1))
    changed = run(engine(model), requests)
    assert_same_tokens(run(core, requests), changed)
    assert graph_capture.records == first
    core.sleep()
    core.wake()
    assert_same_tokens(run(core, requests), changed)
    assert graph_capture.records == 2 * first
    core.use(FixedPolicy(Strategy.parse("test:5")))
    assert_same_tokens(run(core, requests), changed)
    known = graph_capture.records
    for policy in (None, FixedPolicy(PLAIN), FixedPolicy(Strategy.parse("test:5"))):
        core.use(policy)
        assert_same_tokens(run(core, requests), changed)
    # Those that the plain steps of the last runs needed are new, once.
    assert graph_capture.records <= known + first
    assert core._runner._graphs is not None
    assert core._runner._graphs.captured <= graph_capture.records


def test_a_failed_capture_costs_the_graphs_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(8, seed=74)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture(fail_at=2)
    core = graphed(model, graph_capture)
    assert_same_tokens(run(core, requests), expected)
    assert graph_capture.records == 2
    assert graph_capture.resets >= 1
    assert "decoding goes on without graphs" in caplog.text


def test_hidden_states_kept_from_replays_are_their_own(tmp_path: Path) -> None:
    """A drafter that reads hidden states sees those of eager steps: no replay writes into what an earlier one gave."""
    from drafter.eagle import EagleDrafter
    from policies.speculation.options import EagleOptions

    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=75, max_new_tokens=20)
    records: list[list[tuple[int, int]]] = []
    for graph_capture in (None, FakeGraphCapture()):
        drafter = EagleDrafter(model, EagleOptions(), 8, 512, 8)
        seen: list[tuple[int, int]] = []
        core = NativeEngine(
            model,
            options_of(),
            drafters={"eagle": drafter},
            policy=FixedPolicy(Strategy.parse("eagle:3")),
            graph_capture=graph_capture,
            on_step=lambda record, seen=seen: seen.append((record.drafted, record.accepted)),
        )
        core.submit(requests)
        rollouts(drain(core))
        records.append(seen)
    assert records[0] == records[1]
    assert sum(accepted for _, accepted in records[0]) > 0


def test_steps_that_capture_say_nothing_about_a_strategy(tmp_path: Path) -> None:
    """Capturing takes many times a step: the policy must not take it for the strategy's cost."""

    class Listening(FixedPolicy):
        recorded = skipped = 0

        def record(self, *_: Any) -> None:
            self.recorded += 1

        def skip(self, *_: Any) -> None:
            self.skipped += 1

    requests = make_requests(6, seed=76, max_new_tokens=20)
    seen = []
    for graph_capture in (None, FakeGraphCapture()):
        policy = Listening(Strategy.parse("test:3"))
        core = NativeEngine(
            tiny_model(tmp_path),
            options_of(),
            drafters={"test": Oracle({}, spoil=False)},
            policy=policy,
            graph_capture=graph_capture,
        )
        core._speculator.draft = lambda *_: None  # type: ignore[method-assign]
        run(core, requests)
        seen.append((policy.recorded, policy.skipped, 0 if graph_capture is None else graph_capture.records))
    (eager, skipped, _), (timed, more, captures) = seen
    assert captures > 0
    assert (timed, more) == (eager - captures, skipped + captures)
