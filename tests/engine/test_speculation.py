"""Whatever drafts: the tokens are those of plain decoding, and nothing crashes."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.types import Rollout
from drafter.protocol import BatchView, Drafter, Drafts
from tests.engine.support import FAMILIES, VOCAB, assert_same, engine, make_requests, rollouts, run, tiny_model


class Oracle:
    """Knows the answer; every third request's drafts go wrong at the third token."""

    def __init__(self, rollouts: dict[int, Rollout], spoil: bool = False) -> None:
        self.rollouts, self.spoil = rollouts, spoil

    def propose(self, batch: BatchView, depth: int) -> Drafts:
        tokens = np.zeros((len(batch.request_ids), depth), np.int64)
        counts = np.zeros(len(batch.request_ids), np.int64)
        for i, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[i] - batch.prompt_lengths[i])
            answer = self.rollouts[int(request_id)].tokens
            # What the engine shows of the past must be the past.
            history = batch.history[batch.slots[i], batch.prompt_lengths[i] : batch.lengths[i]]
            assert history.tolist() == answer[:done].tolist()
            rest = answer[done : done + depth]
            tokens[i, : len(rest)], counts[i] = rest, len(rest)
            if self.spoil and request_id % 3 == 0 and len(rest) > 2:
                tokens[i, 2] = (tokens[i, 2] + 1) % VOCAB
        return Drafts(tokens, counts)


class Random:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def propose(self, batch: BatchView, depth: int) -> Drafts:
        count = len(batch.slots)
        return Drafts(self.rng.integers(0, VOCAB, (count, depth)), self.rng.integers(0, depth + 1, count))


class Constant:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        return Drafts(np.full((len(batch.slots), depth), 7), np.full(len(batch.slots), depth))


class Empty:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        return Drafts(np.zeros((len(batch.slots), 0), np.int64), np.zeros(len(batch.slots), np.int64))


class TooLong:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        return Drafts(np.ones((len(batch.slots), 500), np.int64), np.full(len(batch.slots), 900))


class WrongVocabulary:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        tokens = np.resize(np.array([5, -3, VOCAB, 2**40]), (len(batch.slots), depth))
        return Drafts(tokens, np.full(len(batch.slots), depth))


class WrongShape:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        return Drafts(np.ones((3, 2, 2)), np.ones(99, np.int64))


class Raises:
    def propose(self, batch: BatchView, depth: int) -> Drafts:
        raise RuntimeError("drafter is out of order")


class Writes:
    """Tries to change the history it is shown."""

    def propose(self, batch: BatchView, depth: int) -> Drafts:
        batch.history[:] = 0
        raise AssertionError("history was writable")


HOSTILE = [Random, Constant, Empty, TooLong, WrongVocabulary, WrongShape, Raises, Writes]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.0, "top_p": 0.9}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_right_drafts_change_no_token_and_save_steps(tmp_path: Path, family: str, sampling: dict) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(20, prompts=6, seed=11, stop_token_ids=(2, 9), **sampling)
    expected = run(engine(model), requests)
    for depth in (1, 3, 8):
        for spoil in (False, True):
            core = engine(model, prefill_chunk_tokens=32)
            core.set_drafter(Oracle(expected, spoil), depth)
            assert_same(run(core, requests), expected)
            assert 0 < core.speculator.accepted <= core.speculator.drafted
            assert (core.speculator.accepted == core.speculator.drafted) != spoil or depth < 3


@pytest.mark.parametrize("drafter", HOSTILE)
def test_a_hostile_drafter_changes_no_token(tmp_path: Path, drafter: type[Drafter]) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=6, seed=12, stop_token_ids=(2, 9))
    expected = run(engine(model), requests)
    core = engine(model)
    core.set_drafter(drafter(), 5)
    assert_same(run(core, requests), expected)
    assert (core.speculator.faults > 0) == (drafter in (Raises, Writes))


@pytest.mark.parametrize("drafter", [Random, Constant])
def test_drafts_under_kv_pressure_and_at_the_models_limit(tmp_path: Path, drafter: type[Drafter]) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=4, seed=13, max_new_tokens=60)
    options = {"kv_tokens": 128, "max_model_tokens": 70}
    expected = run(engine(model, **options), requests)
    core = engine(model, **options)
    core.set_drafter(drafter(), 8)
    assert_same(run(core, requests), expected)


def test_the_drafter_may_change_at_every_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=6, seed=14)
    expected = run(engine(model), requests)
    core = engine(model)
    core.submit(requests)
    drafters: list[Drafter | None] = [Oracle(expected), None, Random(), Constant(), Empty()]
    events, step = [], 0
    while core.has_work:
        drafter = drafters[step % len(drafters)]
        core.set_drafter(drafter, 0 if drafter is None else 1 + step % 6)
        events += core.step()
        step += 1
    assert_same(rollouts(events), expected)


def test_oracle_drafts_need_the_fewest_steps(tmp_path: Path) -> None:
    """Accept length is what it should be: n tokens in ceil((n - 1) / (depth + 1)) steps after the first."""
    model = tiny_model(tmp_path)
    requests = make_requests(1, seed=15, max_new_tokens=36)
    expected = run(engine(model), requests)
    core = engine(model)
    core.set_drafter(Oracle(expected), 4)
    core.submit(requests)
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    assert steps == 1 + (36 - 1) // 5
