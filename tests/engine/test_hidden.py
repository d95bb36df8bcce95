"""Hidden states that drafters are served: bitwise those of a fresh forward over the request's tokens, or none."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import Rollout
from drafter.protocol import BatchView, Drafts
from models import weights
from models.checkpoint import hf_state_dict
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import assert_same, engine, make_requests, options_of, rollouts, run, tiny_model
from tests.engine.test_trees import RandomTrees


class Curious(RandomTrees):
    """Asks for hidden states before every draft and compares each with a forward of its own."""

    needs_hidden = True

    def __init__(self, model: Transformer, answers: dict[int, Rollout], context_tokens: int) -> None:
        super().__init__(answers, 0.7)
        self.model, self.context_tokens = model, context_tokens
        self.served: list[tuple[int, int]] = []  # (rows, length - 1) of each request and step
        self.check_rows = True

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        assert batch.hidden is not None
        assert batch.kv is not None
        lengths = batch.lengths.tolist()
        first = np.array([int(self.rng.integers(0, length)) for length in lengths])
        everything = batch.hidden.last(batch.slots, np.zeros_like(first))
        some = batch.hidden.last(batch.slots, first)
        assert everything.offsets.tolist()[0] == 0
        assert len(everything.rows) == everything.offsets[-1]
        for r, length in enumerate(lengths):
            rows = everything.rows[everything.offsets[r] : everything.offsets[r + 1]]
            fewer = some.rows[some.offsets[r] : some.offsets[r + 1]]
            assert len(fewer) == min(len(rows), max(length - 1 - int(first[r]), 0))
            assert torch.equal(fewer, rows[len(rows) - len(fewer) :])
            tokens = batch.history[batch.slots[r], :length].astype(np.int64)
            if self.check_rows:
                context = PackedContext(torch.tensor([0, length], dtype=torch.int32))
                with torch.no_grad():
                    want = self.model(torch.from_numpy(tokens), context)
                assert torch.equal(rows, want[length - 1 - len(rows) : length - 1])
            self.served.append((len(rows), length - 1))
            # What drew the last token is always there.
            assert not self.check_rows or len(rows) >= (length > batch.prompt_lengths[r])
            blocks = batch.kv.block_tables[batch.slots[r], : -(-length // batch.kv.block_tokens)]
            assert len(set(blocks.tolist())) == len(blocks)
        return super().propose(batch, strategy)


STRATEGIES = [PLAIN, Strategy("curious", 3), Strategy("curious", 4, 2, 9)]


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 128}, {"prefill_chunk_tokens": 16, "max_running": 3}], ids=str)
def test_states_are_those_of_a_fresh_forward(tmp_path: Path, options: dict) -> None:
    """With joins, leaves, preemption, shared prompts, rejected drafts and trees; strategies change at random."""
    model = tiny_model(tmp_path)
    requests = make_requests(14, prompts=5, seed=41)
    expected = run(engine(model, **options), requests)
    drafter = Curious(model, expected, 12)
    core = NativeEngine(model, options_of(**options), drafters={"curious": drafter}, hidden_tokens=12)
    rng, waiting, events = np.random.default_rng(3), list(requests), []
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.submit([waiting.pop()])
        strategy = STRATEGIES[int(rng.integers(3))]
        core.use(FixedPolicy(strategy))
        events += core.step()
    assert_same(rollouts(events), expected)
    assert max(rows for rows, _ in drafter.served) > 12
    assert any(rows < known for rows, known in drafter.served)


def test_kept_states_are_bounded_and_are_whole_for_a_lone_request(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    (request,) = make_requests(1, seed=42, max_new_tokens=40)
    drafter = Curious(model, run(engine(model), [request]), 8)
    core = NativeEngine(model, options_of(max_running=1), drafters={"curious": drafter}, hidden_tokens=8)
    core.submit([request])
    for _ in range(21):
        core.step()
    assert core._hidden is not None
    assert len(core._hidden._steps) == 8
    core.use(FixedPolicy(STRATEGIES[1]))
    core.step()
    assert drafter.served == [(8, len(request.prompt_tokens) + 20)]


def test_states_of_former_weights_are_forgotten(tmp_path: Path) -> None:
    old, new = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", seed=2)
    requests = make_requests(4, seed=43, max_new_tokens=30)
    drafter = Curious(new, run(engine(old), requests), 12)
    drafter.hit, drafter.check_rows = 0.0, False
    core = NativeEngine(old, options_of(), drafters={"curious": drafter}, hidden_tokens=12)
    core.submit(requests)
    for _ in range(6):
        core.step()
    core.update_weights(*weights.pack(hf_state_dict(new), version=1))
    core.use(FixedPolicy(STRATEGIES[2]))
    core.step()
    assert {rows for rows, _ in drafter.served} == {0}
    for step in range(1, 4):
        drafter.served.clear()
        core.step()
        assert drafter.served
        assert all(step <= rows <= step * 5 for rows, _ in drafter.served)
