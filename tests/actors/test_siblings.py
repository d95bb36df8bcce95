"""Texts of split groups: what each worker is told of the others, whatever the order of events."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.context import Context
from actors.engine.batch.siblings import MOST_TOKENS, SiblingTexts
from actors.loop import EventLoop
from contracts.engine import SiblingText
from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams
from launch.dispatch import siblings as module
from launch.dispatch.ledger import Ledger
from launch.dispatch.siblings import PERIOD_S, Siblings

WORKERS = ("a", "b", "c")


def request(request_id: int, prompt_id: int, continues: bool = False) -> Request:
    return Request(
        request_id=request_id,
        prompt_id=prompt_id,
        prompt_tokens=np.array([prompt_id], np.int32),
        noise_key=request_id,
        sampling=SamplingParams(max_new_tokens=100),
        continues=continues,
    )


def sampled(tokens: Sequence[int]) -> Sampled:
    array = np.array(tokens, np.int32)
    zeros = np.zeros(len(array), np.float32)
    return Sampled(array, zeros, zeros)


class World:
    """A ledger, its siblings, and what every worker was told, by request."""

    def __init__(self, requests: Sequence[Request], slots: dict[str, int]) -> None:
        self.ledger = Ledger(requests, max_retries=9)
        self.now_s = 0.0
        self.reaches = True
        self.told: dict[str, dict[int, list[int]]] = {name: defaultdict(list) for name in WORKERS}
        self.messages = 0
        context = Context(loop=EventLoop(lambda: self.now_s), wall=lambda: self.now_s)
        self.siblings = Siblings(self.ledger, context)
        self.texts: dict[int, list[int]] = defaultdict(list)
        self.prompts = {one.request_id: one.prompt_id for one in requests}
        for worker, count in slots.items():
            self.ledger.offer(worker, count)
        self.assign()

    def _send(self, worker: str, texts: Sequence[SiblingText]) -> bool:
        if not self.reaches:
            return False
        self.messages += 1
        for text in texts:
            known = self.told[worker][text.request_id]
            assert text.first == len(known)
            assert text.prompt_id == self.prompts[text.request_id]
            known.extend(text.tokens.tolist())
        return True

    def assign(self) -> None:
        for worker, requests in self.ledger.assign().items():
            self.siblings.assigned(worker, [one.prompt_id for one in requests])
        self.flush()

    def sample(self, worker: str, request_id: int, count: int) -> None:
        fresh = [100 * request_id + len(self.texts[request_id]) + i for i in range(count)]
        self.texts[request_id] += fresh
        assert self.ledger.progress(worker, request_id, sampled(fresh))
        self.siblings.progressed(worker, request_id)
        self.flush()

    def finish(self, worker: str, request_id: int) -> None:
        tokens = [*self.texts[request_id], 7]
        rollout = Rollout(
            request_id=request_id,
            sampled=sampled(tokens),
            finish_reason=FinishReason.STOP,
            weights_version=0,
            started_s=0.0,
            finished_s=0.0,
        )
        prompt_id = self.ledger.shared_prompt(request_id)
        assert self.ledger.finish(worker, rollout)
        self.texts[request_id] = tokens
        if prompt_id is not None:
            self.siblings.ended(worker, request_id, prompt_id, rollout.tokens)
        self.flush()

    def flush(self) -> None:
        self.now_s += PERIOD_S
        for worker, texts in self.siblings.due():
            if self._send(worker, texts):
                self.siblings.sent(worker, texts)


def test_a_group_on_one_worker_is_told_to_nobody() -> None:
    world = World([request(i, 0) for i in range(3)] + [request(9, 1)], {"a": 8, "b": 8})
    held = {i: name for name in WORKERS for i in world.ledger.running(name)}
    world.sample(held[0], 0, 5)
    world.finish(held[0], 0)
    assert world.messages == 0


def test_a_split_group_hears_what_was_sampled_before_and_after_the_split() -> None:
    world = World([request(0, 0), request(1, 0)], {"a": 1})
    world.sample("a", 0, 3)
    world.ledger.offer("b", 1)
    world.assign()
    assert world.told["b"] == {0: [0, 1, 2]}
    world.sample("a", 0, 2)
    world.sample("b", 1, 1)
    world.reaches = False
    world.sample("a", 0, 1)
    world.reaches = True
    world.finish("a", 0)
    assert world.told["b"] == {0: [0, 1, 2, 3, 4, 5, 7]}
    assert world.told["a"] == {1: [100]}


def test_turns_of_episodes_are_not_told() -> None:
    world = World([request(0, 0, continues=True), request(1, 0, continues=True)], {"a": 1, "b": 1})
    world.sample("a", 0 if 0 in world.ledger.running("a") else 1, 3)
    assert world.messages == 0


def test_what_does_not_fit_a_message_comes_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts of which no other token will be reported, one of them longer than a message."""
    monkeypatch.setattr(module, "MOST_TOKENS", 4)
    world = World([request(0, 0), request(1, 0), request(2, 0)], {"a": 2})
    world.sample("a", 0, 9)
    world.sample("a", 1, 3)
    world.ledger.offer("b", 1)
    world.assign()
    world.finish("a", 0)
    world.finish("a", 1)
    for _ in range(6):
        world.flush()
    assert world.told["b"] == {0: [*range(9), 7], 1: [100, 101, 102, 7]}
    assert world.messages == 4, "none without a text"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), drops=st.floats(0, 0.5), most=st.sampled_from([1, 3, module.MOST_TOKENS]))
def test_what_a_worker_was_told_is_the_beginning_of_what_others_sampled(seed: int, drops: float, most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MOST_TOKENS", most)
        told(seed, drops)


def told(seed: int, drops: float) -> None:
    rng = np.random.default_rng(seed)
    world = World([request(i, i % 2) for i in range(8)], {"a": 2, "b": 2, "c": 2})
    for _ in range(60):
        worker = WORKERS[rng.integers(3)]
        held = sorted(world.ledger.running(worker))
        world.reaches = bool(rng.random() >= drops)
        action = rng.random()
        if held and action < 0.7:
            world.sample(worker, int(rng.choice(held)), int(rng.integers(1, 4)))
        elif held and action < 0.85:
            world.finish(worker, int(rng.choice(held)))
        elif action < 0.9:
            for i in held:
                world.texts[i] = world.texts[i]  # known tokens stay with the request
            world.ledger.lose(worker, "lost", now_s=0.0, weights_version=0)
            world.ledger.offer(worker, 2)
        world.assign()
        for texts in world.told.values():
            for request_id, tokens in texts.items():
                assert tokens == world.texts[request_id][: len(tokens)]
    world.reaches = True
    for _ in range(sum(map(len, world.texts.values())) + 1):
        world.flush()
    for worker in WORKERS:
        mine = {world.prompts[i] for i in world.ledger.running(worker)}
        for other in set(WORKERS) - {worker}:
            for i in world.ledger.running(other):
                if world.prompts[i] in mine and world.texts[i] and worker in world.ledger.holders(world.prompts[i]):
                    assert world.told[worker][i], "a sibling with known tokens was told nothing of"


def test_texts_wait_for_their_prompt_within_a_bound() -> None:
    held = SiblingTexts()
    text = SiblingText(3, 5, 0, np.arange(MOST_TOKENS // 2, dtype=np.int32), 1.0)
    held.count([text], 1.5)
    for _ in range(3):
        held.hold(text)
    assert len(held.of(3)) == 2
    assert held.of(3) == []
    held.hold(text)
    held.clear()
    assert held.of(3) == []
    tokens, delay_s = held.take()
    assert (tokens, delay_s / tokens, held.take()) == (MOST_TOKENS // 2, 0.5, (0, 0.0))
