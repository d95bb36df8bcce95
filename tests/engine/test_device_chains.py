"""Chains by a copy of the target on a device: what passes one by one give, captured or not, padded, short of room.

On CPU: the kernels' oracles compute, and graphs are recorded by a fake that computes again on the same tensors.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.engine.batch.slots import SlotTable
from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.chains import CpuChains
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_chains import DeviceChains
from actors.engine.native.forward.kv_memory import AllocatedMemory
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from config.formats import FORMATS
from config.strategy import Strategy
from drafter.protocol import BatchView
from drafter.self import SelfDrafter
from models.checkpoint import init_model
from models.config import ModelConfig
from models.low_bit_copy import low_bit_copy, round_again
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import (
    engine,
    hf_config,
    make_requests,
    options_of,
    run,
    write_config,
)
from tests.engine.test_graphs import FakeGraphCapture, StayingMemory, assert_same_tokens

SIZE, BLOCKS, SLOTS, DEPTH = 8, 40, 6, 4
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
CPU = torch.device("cpu")


def copy_of(target: Transformer, name: str) -> Transformer:
    copy = low_bit_copy(target, FORMATS[name])
    round_again(copy, target)
    return copy


class World:
    """Requests in the middle of their responses, over a cache of random keys and values."""

    def __init__(self, lengths: list[int], rooms: list[int], seed: int = 0, *, truncated: bool = False) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        config = ModelConfig.from_hf(hf_config("qwen3", num_hidden_layers=2, max_position_embeddings=64, **WIDE))
        self.target = Transformer(config, batch_invariant=False).requires_grad_(False)
        for parameter in self.target.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.fill_(1.0)
        self.table = SlotTable(SLOTS, 64, -(-64 // SIZE))
        self.cache = KVCache(config, BLOCKS + RESERVED_BLOCKS, SIZE, torch.float32, "cpu")
        for each in (self.cache.all_keys, self.cache.all_values):
            each.normal_()
        slots = rng.permutation(SLOTS)[: len(lengths)]
        blocks = iter(rng.permutation(BLOCKS))
        for slot, length, room in zip(slots, lengths, rooms, strict=True):
            held = -(-(length + room) // SIZE)
            self.table.append_blocks(slot, [int(next(blocks)) for _ in range(held)])
        self.table.tokens[:] = rng.integers(0, config.vocab_size, self.table.tokens.shape)
        count = len(lengths)
        self.batch = BatchView(
            request_ids=np.arange(count),
            prompt_ids=np.arange(count),
            slots=slots,
            history=self.table.tokens,
            lengths=np.array(lengths),
            prompt_lengths=np.minimum(lengths, 3),
            noise_keys=rng.integers(1, 2**62, count),
            temperatures=np.where(np.arange(count) % 3 == 2, 0, 0.8).astype(np.float32),
            vocab_size=config.vocab_size,
            top_k=np.full(count, 9 if truncated else 0),
            top_p=np.full(count, 0.9 if truncated else 1.0, np.float32),
            room=np.array(rooms),
        )

    def chains(self, *, keep_logits: bool = False) -> DeviceChains:
        return DeviceChains(self.table, self.cache, CPU, trash_slot=BLOCKS * SIZE, keep_logits=keep_logits)

    def own_slots(self) -> set[int]:
        """Where the chain may write: behind what is known, as far as there is room, and in the trash block."""
        found = set(range(BLOCKS * SIZE, (BLOCKS + RESERVED_BLOCKS) * SIZE))
        for slot, length, room in zip(self.batch.slots, self.batch.lengths, self.batch.room, strict=True):
            for position in range(length - 1, length - 1 + min(max(int(room), 1), DEPTH)):
                found.add(int(self.table.block_tables[slot, position // SIZE]) * SIZE + position % SIZE)
        return found


requests_st = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=SLOTS)


@settings(deadline=None, max_examples=25)
@given(requests_st, st.sampled_from(["w4a16", "w8a8"]), st.booleans(), st.booleans())
@example([(1, 0), (1, 0), (33, 0), (40, 1)], "w8a8", False, False)  # a step apart on one kind of CPU, as is the next
@example([(1, 0), (1, 0), (27, 6), (40, 1)], "w8a8", False, False)
def test_a_chain_is_its_passes_one_by_one(
    requests: list[tuple[int, int]], name: str, truncated: bool, graphs: bool
) -> None:
    """Captured or not, in a bucket with more requests, whatever the rooms; and it writes nowhere else."""
    lengths, rooms = [n for n, _ in requests], [room for _, room in requests]
    expected_of, found_of = World(lengths, rooms, truncated=truncated), World(lengths, rooms, truncated=truncated)
    copy, untouched = copy_of(expected_of.target, name), expected_of.cache.all_keys.clone()
    expected, expected_logits = CpuChains(expected_of.table, expected_of.cache).separate_passes(
        copy, expected_of.batch, DEPTH, logits=True
    )
    chains = found_of.chains()
    if graphs:
        chains.plan_graphs(copy, [(SLOTS, Strategy("self", DEPTH)), (2, Strategy("self", DEPTH))], FakeGraphCapture())
    before = found_of.cache.all_keys.clone()
    found, logits = chains.chain(copy, found_of.batch, DEPTH, logits=True)
    np.testing.assert_array_equal(found, expected)
    assert logits is not None
    assert expected_logits is not None
    real = torch.from_numpy(found >= 0)
    kept = logits[real].isfinite()  # -inf where top-k or top-p leave a token out
    assert kept.all() != truncated or not real.any()
    # Where tokens are rounded to eight bits, other sums before it may round one otherwise: by a step, here and there.
    # A step is 0.024 in the mean of four logits' rows; keys that are wrong by a twentieth are 0.23 and more.
    apart, exact = (logits[real][kept] - expected_logits[real][kept]).abs(), name == "w4a16"
    if apart.numel():
        assert apart.max() < 1e-3 if exact else apart.mean() < 0.08
    assert changed(found_of.cache, before) <= found_of.own_slots()
    there = torch.tensor(sorted(changed(expected_of.cache, untouched)), dtype=torch.int64)
    for one, other in zip(found_of.cache.keys, expected_of.cache.keys, strict=True):
        torch.testing.assert_close(one[there], other[there], rtol=1e-4, atol=1e-4 if exact else 0.02)


def changed(cache: KVCache, before: torch.Tensor) -> set[int]:
    """The slots that were written."""
    slots: list[int] = (cache.all_keys != before).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
    return set(slots)


def test_chains_of_a_plan_are_captured_once_and_then_replayed() -> None:
    world, capture = World([9, 20, 33], [6, 0, 2]), FakeGraphCapture()
    copy, chains = copy_of(world.target, "w4a16"), world.chains()
    plan = [(6, Strategy("self", 4)), (6, Strategy("self", 2)), (2, Strategy("self", 4))]
    chains.plan_graphs(copy, plan, capture)
    assert capture.records == 3
    chains.plan_graphs(copy, plan, capture)
    assert capture.records == 3, "what is captured stays"
    chains.chain(copy, world.batch, 4)
    assert (capture.records, capture.replays, chains.captured) == (3, 1, False)
    chains.chain(copy, world.batch, 3)
    assert capture.records == 3, "a depth that nobody planned runs eagerly"
    cut = World([9, 20, 33], [6, 0, 2], truncated=True).batch
    chains.chain(copy, cut, 4)
    assert (capture.records, chains.captured) == (4, True), "draws with top-k that nobody announced"


def test_chains_for_top_k_are_captured_at_the_start_where_they_are_announced() -> None:
    for truncated in (True, False):
        world, capture = World([9, 20, 33], [6, 0, 2], truncated=truncated), FakeGraphCapture()
        copy, chains = copy_of(world.target, "w4a16"), world.chains()
        chains.plan_graphs(copy, [(6, Strategy("self", 4))], capture, True)
        found, _ = chains.chain(copy, world.batch, 4)
        expected, _ = CpuChains(world.table, world.cache).separate_passes(copy, world.batch, 4)
        np.testing.assert_array_equal(found, expected)
        assert (capture.records, capture.replays, chains.captured) == (1, 1, False)


def test_a_copy_that_changes_in_place_is_what_graphs_read() -> None:
    world = World([9, 20], [4, 4])
    copy, chains = copy_of(world.target, "w4a16"), world.chains()
    chains.plan_graphs(copy, [(2, Strategy("self", 4))], FakeGraphCapture())
    before, _ = chains.chain(copy, world.batch, 4)
    other = copy_of(World([9], [1], seed=5).target, "w4a16")
    for mine, theirs in zip(copy.buffers(), other.buffers(), strict=True):
        mine.copy_(theirs)
    found, _ = chains.chain(copy, world.batch, 4)
    expected, _ = CpuChains(world.table, world.cache).separate_passes(copy, world.batch, 4)
    np.testing.assert_array_equal(found, expected)
    assert (found != before).any()


def test_a_capture_that_fails_is_drafted_without() -> None:
    world = World([9, 20], [4, 1])
    copy, chains = copy_of(world.target, "w4a16"), world.chains()
    chains.plan_graphs(copy, [(6, Strategy("self", 4)), (2, Strategy("self", 4))], FakeGraphCapture(fail_at=1))
    found, _ = chains.chain(copy, world.batch, 4)
    expected, _ = CpuChains(world.table, world.cache).separate_passes(copy, world.batch, 4)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("memory", [StayingMemory, AllocatedMemory])
def test_an_engine_that_drafts_with_itself_gives_the_tokens_of_plain_decoding(tmp_path: Path, memory: Any) -> None:
    """With graphs and ragged rooms, through sleep: of a cache that moves all chains are captured again."""
    model = init_model(write_config(tmp_path / "model", "qwen3", **WIDE), 0)
    requests = make_requests(14, prompts=5, seed=71, stop_token_ids=(3,), max_new_tokens=24)
    expected = run(engine(model), requests)
    capture = FakeGraphCapture()
    records: list[EngineStepRecord] = []
    core = NativeEngine(
        model,
        options_of(max_running=8),
        drafters={"self": SelfDrafter(model, FORMATS["w8a8"])},
        policy=FixedPolicy(Strategy.parse("self:3")),
        graph_capture=capture,
        make_memory=memory,
        steps=records,
    )
    captured = capture.records
    assert_same_tokens(run(core, requests), expected)
    assert capture.records == captured, "all captured at the start"
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    assert drafted > 200
    assert accepted > 0.8 * drafted, "eight bits say nearly what the target says"
    core.sleep()
    core.wake()
    assert (capture.records > captured) == (memory is AllocatedMemory)
    assert_same_tokens(run(core, requests), expected)
