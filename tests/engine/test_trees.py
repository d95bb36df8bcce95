"""Trees: one target pass over all nodes changes no token, whatever the tree."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import Rollout
from drafter.protocol import BatchView, Drafts
from policies.speculation.policy import FixedPolicy
from tests.engine.support import (
    FAMILIES,
    VOCAB,
    Counted,
    DrafterBase,
    assert_same,
    engine,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
)

SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.0, "top_p": 0.9}]


class RandomTrees(DrafterBase):
    """Any valid tree of the strategy's size; `rollouts` (the answer) is grown into it at random places."""

    def __init__(self, answers: dict[int, Rollout], hit: float, seed: int = 0) -> None:
        self.answers, self.hit, self.rng = answers, hit, np.random.default_rng(seed)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, nodes = len(batch.slots), strategy.tokens_to_verify
        tokens, parents = np.zeros((count, nodes), np.int64), np.full((count, nodes), -1)
        counts = self.rng.integers(0, nodes + 1, count)
        for r, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[r] - batch.prompt_lengths[r])
            answer = self.answers[int(request_id)].tokens[done:]
            depths = np.zeros(nodes, np.int64)
            on_path = np.zeros(nodes, np.bool_)
            taken: set[tuple[int, int]] = set()
            for i in range(counts[r]):
                parent = int(self.rng.integers(-1, i))
                while parent >= 0 and depths[parent] >= strategy.depth:
                    parent = int(parents[r, parent])
                depth = 1 if parent < 0 else int(depths[parent]) + 1
                right = int(answer[depth - 1]) if depth <= len(answer) and (parent < 0 or on_path[parent]) else -1
                token = int(self.rng.integers(VOCAB))
                if self.rng.random() < self.hit and right >= 0 and (parent, right) not in taken:
                    token = right
                while (parent, token) in taken:
                    token = int(self.rng.integers(VOCAB))
                taken.add((parent, token))
                tokens[r, i], parents[r, i], depths[i], on_path[i] = token, parent, depth, token == right
        return Drafts(tokens, counts, parents)


class WrongTrees(DrafterBase):
    """One kind of nonsense after another."""

    def __init__(self) -> None:
        self.rng, self.calls = np.random.default_rng(0), 0

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, nodes = len(batch.slots), strategy.tokens_to_verify
        self.calls += 1
        tokens = self.rng.integers(-2, VOCAB + 2, (count, nodes))
        counts = self.rng.integers(-1, nodes + 3, count)
        parents = [
            self.rng.integers(-5, nodes + 5, (count, nodes)),
            np.full((count, nodes), 2**40),
            np.zeros((count, nodes)) + 0.5,
            np.zeros((count, 1), np.int64),
            np.zeros(count, np.int64),
            np.tile(np.arange(nodes), (count, 1)),  # everyone its own parent
            np.full((count, nodes), -1),
        ][self.calls % 7]
        if self.calls % 3 == 0:
            tokens[:] = 5  # twins
        return Drafts(tokens, counts, parents)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_trees_change_no_token_and_save_steps(tmp_path: Path, family: str, sampling: dict) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(20, prompts=6, seed=21, stop_token_ids=(2, 9), **sampling)
    expected = run(engine(model), requests)
    for shape, hit in (("test:3x3/9", 0.9), ("test:6x2/14", 0.5), ("test:1x4/4", 0.3), ("test:4x4/10", 0.0)):
        counted = Counted(model, RandomTrees(expected, hit), shape, prefill_chunk_tokens=32)
        assert_same(counted.run(requests), expected)
        assert counted.drafted > 0
        assert counted.accepted > 0 or hit == 0.0


@pytest.mark.parametrize("drafter", [WrongTrees, lambda: RandomTrees({}, 0.0)])
def test_hostile_trees_change_no_token(tmp_path: Path, drafter: type[DrafterBase]) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=6, seed=22, stop_token_ids=(2, 9))
    expected = run(engine(model), requests)
    made = drafter()
    if isinstance(made, RandomTrees):
        made.answers = expected
    counted = Counted(model, made, "test:3x3/9")
    assert_same(counted.run(requests), expected)
    assert counted.drafted > 0


def test_trees_under_kv_pressure_and_at_the_models_limit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=4, seed=23, max_new_tokens=60)
    options = {"kv_tokens": 128, "max_model_tokens": 70}
    expected = run(engine(model, **options), requests)
    counted = Counted(model, RandomTrees(expected, 0.8), "test:4x4/16", **options)
    assert_same(counted.run(requests), expected)
    assert counted.core._scheduler.preempted > 0
    counted.core.sleep()
    assert counted.core._scheduler._pool.free == 16


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_trees_across_block_borders_with_requests_that_join(tmp_path: Path, block_tokens: int) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(24, prompts=6, seed=24)
    expected = run(engine(model, block_tokens=block_tokens), requests)
    drafters = {"tree": RandomTrees(expected, 0.7), "chain": RandomTrees(expected, 0.7, seed=1)}
    core = NativeEngine(model, options_of(block_tokens=block_tokens), drafters=drafters)
    strategies = [PLAIN, Strategy("tree", 4, 3, 12), Strategy("chain", 5, 2, 9), Strategy("tree", 2, 2, 4)]
    rng, waiting, events = np.random.default_rng(2), list(requests), []
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.submit([waiting.pop()])
        core.use(FixedPolicy(strategies[int(rng.integers(4))]))
        events += core.step()
    assert_same(rollouts(events), expected)
