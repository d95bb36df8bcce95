"""Drafters that are wrong in every way we could think of. None may change a token, or take the engine with it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from config.strategy import Strategy
from contracts.rollout import Rollout
from drafter.protocol import BatchView, Drafts
from tests.engine.support import VOCAB, DrafterBase

Answer = Callable[[np.random.Generator, int, int], Any]  # (randomness, requests, nodes) -> what `propose` returns


class Answers(DrafterBase):
    """Whatever the function says; for trees and chains alike."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.rng = answer, np.random.default_rng(0)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        return self.answer(self.rng, len(batch.slots), strategy.tokens_to_verify)


def full(count: int, nodes: int, tokens: Any, parents: Any = None, counts: Any = None) -> Drafts:
    """`tokens` broadcast to [count, nodes], all of them meant."""
    tokens = np.broadcast_to(np.asarray(tokens), (count, nodes)).copy()
    return Drafts(tokens, np.full(count, nodes) if counts is None else counts, parents)


def chain(count: int, nodes: int) -> np.ndarray:
    return np.tile(np.arange(nodes) - 1, (count, 1))


def spread(distributions: Any) -> Drafts:
    """Chains of the token 3 that claim to be drawn from `distributions` [R, K, V]."""
    requests, width = len(distributions), len(distributions[0])
    return Drafts(np.full((requests, width), 3), np.full(requests, width), None, distributions)


HOSTILE: Mapping[str, Answer] = {
    "random chains": lambda rng, r, k: Drafts(rng.integers(0, VOCAB, (r, k)), rng.integers(0, k + 1, r)),
    "random trees": lambda rng, r, k: full(
        r, k, rng.integers(0, VOCAB, (r, k)), np.stack([rng.integers(-1, i + 1, r) - (i > 0) for i in range(k)], 1)
    ),
    "constant": lambda rng, r, k: full(r, k, 7),
    "empty": lambda rng, r, k: Drafts(np.zeros((r, 0), np.int64), np.zeros(r, np.int64)),
    "too long": lambda rng, r, k: Drafts(np.ones((r, 500), np.int64), np.full(r, 900)),
    "a tree too long": lambda rng, r, k: full(r, 300, rng.integers(0, VOCAB, (r, 300)), chain(r, 300)),
    "wrong vocabulary": lambda rng, r, k: full(r, k, np.resize([5, -3, VOCAB, 2**40], (r, k))),
    "every token negative": lambda rng, r, k: full(r, k, -1),
    "unsigned and huge": lambda rng, r, k: full(r, k, np.full((r, k), 2**64 - 1, np.uint64)),
    "negative counts": lambda rng, r, k: full(r, k, 3, counts=np.full(r, -4)),
    "huge counts": lambda rng, r, k: full(r, k, 3, counts=np.full(r, 2**62)),
    "floats": lambda rng, r, k: full(r, k, 3.0),
    "NaN": lambda rng, r, k: full(r, k, np.nan),
    "NaN counts": lambda rng, r, k: full(r, k, 3, counts=np.full(r, np.nan)),
    "booleans": lambda rng, r, k: full(r, k, True),
    "strings": lambda rng, r, k: full(r, k, "token"),
    "objects": lambda rng, r, k: full(r, k, np.full((r, k), None)),
    "one request too many": lambda rng, r, k: full(r + 1, k, 3),
    "one request too few": lambda rng, r, k: full(max(r - 1, 0), k, 3),
    "wrong rank": lambda rng, r, k: Drafts(np.ones((r, 2, 2), np.int64), np.ones((r, 2), np.int64)),
    "scalars": lambda rng, r, k: Drafts(np.int64(3), np.int64(1)),
    "lists": lambda rng, r, k: Drafts([[3] * k for _ in range(r)], [k] * r),
    "ragged lists": lambda rng, r, k: Drafts([[3] * (i + 1) for i in range(r)], [1] * r),
    "nothing": lambda rng, r, k: None,
    "no drafts at all": lambda rng, r, k: "drafts",
    "its own parents": lambda rng, r, k: full(r, k, np.arange(k), np.tile(np.arange(k), (r, 1))),
    "parents in a circle": lambda rng, r, k: full(r, k, np.arange(k), np.tile(np.roll(np.arange(k), -1), (r, 1))),
    "parents out of range": lambda rng, r, k: full(r, k, np.arange(k), rng.choice([-9, k, 2**40, -(2**40)], (r, k))),
    "float parents": lambda rng, r, k: full(r, k, np.arange(k), np.full((r, k), np.nan)),
    "few parents": lambda rng, r, k: full(r, k, np.arange(k), np.zeros((r, 1), np.int64)),
    "twins": lambda rng, r, k: full(r, k, 5, np.full((r, k), -1)),
    "too deep": lambda rng, r, k: full(r, k, rng.integers(0, VOCAB, (r, k)), chain(r, k)),
    "now and then something else": lambda rng, r, k: HOSTILE[list(HOSTILE)[rng.integers(31)]](rng, r, k),
    "wrong distributions": lambda rng, r, k: Drafts(
        np.full((r, k), 3), np.full(r, k), None, torch.full((r, k, VOCAB), float("nan"))
    ),
    "distributions of another size": lambda rng, r, k: Drafts(
        np.full((r, k), 3), np.full(r, k), None, torch.zeros((r, k, 3))
    ),
    "distributions in numpy": lambda rng, r, k: spread(np.full((r, k, VOCAB), 1 / VOCAB)),
    "distributions as a list": lambda rng, r, k: spread([[[1.0] * VOCAB] * k] * r),
    "distributions of integers": lambda rng, r, k: spread(torch.ones((r, k, VOCAB), dtype=torch.int64)),
    "distributions of complex numbers": lambda rng, r, k: spread(torch.ones((r, k, VOCAB), dtype=torch.complex64)),
    "distributions elsewhere": lambda rng, r, k: spread(torch.ones((r, k, VOCAB), device="meta")),
    "sparse distributions": lambda rng, r, k: spread(torch.ones((r, k, VOCAB)).to_sparse()),
}


class Adversary(DrafterBase):
    """Knows the answers and drafts as much as allowed, right but for the one node where it hurts most."""

    def __init__(self, answers: Mapping[int, Rollout]) -> None:
        self.answers, self.calls = answers, 0

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, depth = len(batch.slots), strategy.depth
        self.calls += 1
        tokens = np.zeros((count, depth), np.int64)
        for r, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[r] - batch.prompt_lengths[r])
            rest = self.answers[int(request_id)].tokens[done : done + depth]
            tokens[r, : len(rest)] = rest
        wrong = self.calls % depth
        tokens[:, wrong] = (tokens[:, wrong] + 1 + self.calls % 3) % VOCAB
        return Drafts(tokens, np.full(count, depth))  # beyond `room`, too


class Raises(DrafterBase):
    """At the given call of the given method, from its first on."""

    def __init__(self, method: str, calls: int = 0) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("drafter is out of order")
            return Drafts(np.full((0, 0), 1), np.zeros(0, np.int64))

        self.left = calls
        setattr(self, method, fail)


class Exits(DrafterBase):
    """Raises what is not an error of its own making."""

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        raise MemoryError


class Writes(DrafterBase):
    """Tries to change every array it is shown, then goes on as if nothing had been."""

    def __init__(self) -> None:
        self.refused = 0

    def begin(self, slot: int, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> None:
        self.write(prompt_tokens)
        self.write(response_tokens)

    def end(self, slot: int, tokens: np.ndarray, prompt_length: int, finished: bool) -> None:
        self.write(tokens)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        for name in type(batch).__slots__:
            value = getattr(batch, name)
            if isinstance(value, np.ndarray):
                self.write(value)
        return Drafts(np.full((len(batch.slots), 2), 4), np.full(len(batch.slots), 2))

    def write(self, array: np.ndarray) -> None:
        try:
            array[...] = 1
        except ValueError:
            self.refused += 1


class Keeps(DrafterBase):
    """Hands out the same arrays again and again, and changes them behind the engine's back."""

    def __init__(self) -> None:
        self.tokens, self.counts = np.zeros((64, 8), np.int64), np.zeros(64, np.int64)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count = len(batch.slots)
        self.tokens += 1
        self.tokens %= VOCAB
        self.counts[:] = strategy.depth
        return Drafts(self.tokens[:count], self.counts[:count])

    def end(self, slot: int, tokens: np.ndarray, prompt_length: int, finished: bool) -> None:
        self.tokens[:] = -1
        self.counts[:] = 10**9
