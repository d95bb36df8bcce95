"""Chains: whatever is drafted, the tokens are those of plain decoding; good drafts save steps, bad ones cost none."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import Rollout
from drafter.protocol import BatchView, Drafts
from models.checkpoint import hf_state_dict
from models.weights import pack
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


class Oracle(DrafterBase):
    """Knows the answer; every third request's drafts go wrong at the third token."""

    def __init__(self, rollouts: dict[int, Rollout], spoil: bool = False) -> None:
        self.rollouts, self.spoil = rollouts, spoil

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        depth = strategy.depth
        tokens = np.zeros((len(batch.request_ids), depth), np.int64)
        counts = np.zeros(len(batch.request_ids), np.int64)
        for i, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[i] - batch.prompt_lengths[i])
            answer = self.rollouts[int(request_id)].tokens
            # What the engine shows of the past must be the past.
            history = batch.history[batch.slots[i], batch.prompt_lengths[i] : batch.lengths[i]]
            assert history.tolist() == answer[:done].tolist()
            rest = answer[done : done + depth]
            assert len(rest) <= batch.room[i] + 1
            tokens[i, : len(rest)], counts[i] = rest, len(rest)
            if self.spoil and request_id % 3 == 0 and len(rest) > 2:
                tokens[i, 2] = (tokens[i, 2] + 1) % VOCAB
        return Drafts(tokens, counts)


class Random(DrafterBase):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, depth = len(batch.slots), strategy.depth
        return Drafts(self.rng.integers(0, VOCAB, (count, depth)), self.rng.integers(0, depth + 1, count))


class Constant(DrafterBase):
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        shape = len(batch.slots), strategy.depth
        return Drafts(np.full(shape, 7), np.full(shape[0], shape[1]))


class Empty(DrafterBase):
    pass


class TooLong(DrafterBase):
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        return Drafts(np.ones((len(batch.slots), 500), np.int64), np.full(len(batch.slots), 900))


class WrongVocabulary(DrafterBase):
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        tokens = np.resize(np.array([5, -3, VOCAB, 2**40]), (len(batch.slots), strategy.depth))
        return Drafts(tokens, np.full(len(batch.slots), strategy.depth))


class WrongShape(DrafterBase):
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        return Drafts(np.ones((3, 2, 2)), np.ones(99, np.int64))


class Raises(DrafterBase):
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        raise RuntimeError("drafter is out of order")


class RaisesWhenTold(Constant):
    def begin(self, slot: int, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> None:
        raise RuntimeError("drafter is out of order")


class Writes(DrafterBase):
    """Tries to change the history it is shown."""

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        batch.history[:] = 0
        raise AssertionError("history was writable")


HOSTILE = [Random, Constant, Empty, TooLong, WrongVocabulary, WrongShape, Raises, RaisesWhenTold, Writes]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.0, "top_p": 0.9}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_right_drafts_change_no_token_and_save_steps(tmp_path: Path, family: str, sampling: dict) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(20, prompts=6, seed=11, stop_token_ids=(2, 9), **sampling)
    expected = run(engine(model), requests)
    for depth in (1, 3, 8):
        for spoil in (False, True):
            counted = Counted(model, Oracle(expected, spoil), f"test:{depth}", prefill_chunk_tokens=32)
            assert_same(counted.run(requests), expected)
            assert 0 < counted.accepted <= counted.drafted
            assert (counted.accepted == counted.drafted) != spoil or depth < 3


@pytest.mark.parametrize("drafter", HOSTILE)
def test_a_hostile_drafter_changes_no_token(
    tmp_path: Path, drafter: type[DrafterBase], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=6, seed=12, stop_token_ids=(2, 9))
    expected = run(engine(model), requests)
    counted = Counted(model, drafter(), "test:5")
    assert_same(counted.run(requests), expected)
    faults = [record for record in caplog.records if "decoding goes on without it" in record.message]
    assert len(faults) == (drafter in (Raises, RaisesWhenTold, Writes))
    if faults:
        assert counted.drafted == 0
        assert counted.records[-1].strategy is PLAIN  # The policy heard that it is unavailable.


@pytest.mark.parametrize("drafter", [Random, Constant])
def test_drafts_under_kv_pressure_and_at_the_models_limit(tmp_path: Path, drafter: type[DrafterBase]) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=4, seed=13, max_new_tokens=60)
    options = {"kv_tokens": 128, "max_model_tokens": 70}
    expected = run(engine(model, **options), requests)
    assert_same(Counted(model, drafter(), "test:8", **options).run(requests), expected)


def test_drafts_cost_no_request_its_place(tmp_path: Path) -> None:
    """Where every draft is wrong, who runs when and who is preempted is as without drafts, step by step."""
    model = tiny_model(tmp_path)
    requests = make_requests(24, prompts=5, seed=17, max_new_tokens=60)
    expected = run(engine(model, kv_tokens=200), requests)

    class Wrong(Oracle):
        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            drafts = super().propose(batch, strategy)
            return Drafts((drafts.tokens + 1) % VOCAB, drafts.counts)

    who: dict[str, list[tuple[int, ...]]] = {}
    for strategy in ("plain", "test:12"):
        counted = Counted(model, Wrong(expected), strategy, kv_tokens=200)
        counted.core.submit(requests)
        who[strategy] = []
        while counted.core.has_work:
            counted.core.step()
            who[strategy].append(tuple(counted.core._scheduler._running))
        assert counted.core._scheduler.preempted > 0
        assert counted.accepted == 0
        assert (counted.drafted > 0) == (strategy != "plain")
    assert who["plain"] == who["test:12"]


def test_the_strategy_may_change_at_every_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=6, seed=14)
    expected = run(engine(model), requests)
    drafters = {"oracle": Oracle(expected), "random": Random(), "constant": Constant(), "empty": Empty()}
    core = NativeEngine(model, options_of(), drafters=drafters)
    core.submit(requests)
    names = ["oracle", None, "random", "constant", "empty", "nobody"]
    events, step = [], 0
    while core.has_work:
        name = names[step % len(names)]
        core.use(FixedPolicy(PLAIN if name is None else Strategy(name, 1 + step % 6)))
        events += core.step()
        step += 1
    assert_same(rollouts(events), expected)


def test_drafters_know_the_version_that_the_engine_starts_with(tmp_path: Path) -> None:
    class Told(DrafterBase):
        def __init__(self) -> None:
            self.versions: list[int] = []

        def new_target(self, version: int) -> None:
            self.versions.append(version)

    model, drafter = tiny_model(tmp_path), Told()
    core = NativeEngine(model, options_of(), weights_version=7, drafters={"test": drafter})
    core.update_weights(*pack(hf_state_dict(model), 8))
    assert drafter.versions == [7, 8]


def test_oracle_drafts_need_the_fewest_steps(tmp_path: Path) -> None:
    """Accept length is what it should be: n tokens in ceil((n - 1) / (depth + 1)) steps after the first."""
    model = tiny_model(tmp_path)
    requests = make_requests(1, seed=15, max_new_tokens=36)
    expected = run(engine(model), requests)
    counted = Counted(model, Oracle(expected), "test:4")
    (rollout,) = counted.run(requests).values()
    assert len(counted.records) == rollout.verifications == 1 + (36 - 1) // 5


def test_verifications_count_the_steps_of_this_engine(tmp_path: Path) -> None:
    """With preemption, re-issued prefixes and drafts of every length."""
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=4, seed=16, max_new_tokens=60)
    plain = run(engine(model, kv_tokens=128), requests)
    assert all(rollout.verifications == len(rollout.tokens) for rollout in plain.values())
    counted = Counted(model, Oracle(plain, spoil=True), "test:6", kv_tokens=128)
    results = counted.run(requests)
    assert counted.core._scheduler.preempted > 0
    tokens = sum(len(rollout.tokens) for rollout in results.values())
    drawn = sum(rollout.verifications for rollout in results.values())
    # Every step of a request emits one token more than it accepts, or as many where it ends on an accepted one.
    assert tokens - counted.accepted <= drawn <= tokens - counted.accepted + len(results)
