"""The suffix index by brute force: what native/suffix_*.h promises, read from sorted lists of all contexts."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONTEXT, BORDER = 64, 4
WINDOW_CANDIDATES, OWN_CANDIDATES, LEVELS = 16, 8, 8
OWN_WEIGHT = np.float32(4)
SILENT, POOL_PARTS = 1, 16
INDEX_BYTES, ROLLOUT_BYTES, TOKEN_BYTES = 512, 128, 10
LEVEL = [np.float32(float(np.float32(1.3)) ** min(i, 12)) for i in range(CONTEXT + 1)]
TREE = [np.float32(3.0 ** min(i, 12)) for i in range(CONTEXT + 1)]


def context(tokens: list[int], place: int) -> tuple[int, ...]:
    """The tokens before `place`, backwards."""
    return tuple(tokens[max(0, place - CONTEXT) : place][::-1])


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@dataclass
class Candidate:
    tokens: list[int]  # what followed
    length: int
    weight: np.float32
    own: bool

    def proposal(self, path: list[int]) -> int | None:
        if len(path) < len(self.tokens):
            return self.tokens[len(path)]
        return path[len(path) - len(self.tokens)] if self.own else None


@dataclass
class Rollout:
    tokens: list[int]
    border: int
    version: int

    @property
    def places(self) -> int:
        return len(self.tokens) - max(self.border, 1)


def fit(rollouts: list[Rollout], limit: int) -> list[Rollout]:
    """The newest that fit into `limit` bytes, in their order."""
    used, kept = INDEX_BYTES, 0
    for rollout in reversed(rollouts):
        used += ROLLOUT_BYTES + TOKEN_BYTES * len(rollout.tokens)
        if used > limit:
            break
        kept += 1
    return rollouts[len(rollouts) - kept :]


@dataclass
class Oracle:
    """Any number of problems, without a limit to all of them."""

    window_bytes: int
    pool_bytes: int
    decay: float
    version: int = 0
    windows: dict[tuple[int, ...], list[Rollout]] = field(default_factory=dict)  # oldest first
    pool: list[Rollout] = field(default_factory=list)
    pending: list[Rollout] = field(default_factory=list)  # for the pool
    running: dict[int, tuple[tuple[int, ...], list[int]]] = field(default_factory=dict)  # handle: prompt, text

    def begin(self, handle: int, prompt: list[int]) -> None:
        self.running[handle] = tuple(prompt), list(prompt)

    def append(self, handle: int, tokens: list[int]) -> None:
        self.running[handle][1].extend(tokens)

    def finish(self, handle: int, keep: bool, version: int) -> None:
        prompt, text = self.running.pop(handle)
        if keep:
            self.publish(list(prompt), text[len(prompt) :], version)

    def publish(self, prompt: list[int], response: list[int], version: int) -> None:
        if response:
            tail = prompt[-BORDER:] if prompt else []
            most = (self.window_bytes - INDEX_BYTES - ROLLOUT_BYTES) // TOKEN_BYTES
            rollout = Rollout((tail + response)[:most], len(tail), version)
            window = self.windows.setdefault(tuple(prompt), [])
            self.windows[tuple(prompt)] = fit([*window, rollout], self.window_bytes)
            if fit([rollout], self.pool_bytes):
                self.pending = fit([*self.pending, rollout], self.pool_bytes)

    def merge_pool(self) -> None:
        """Before a round of drafts: if what waits is worth a pass over all."""
        waiting, all_of_it = (sum(r.places for r in part) for part in (self.pending, self.pool + self.pending))
        if waiting * POOL_PARTS >= all_of_it:
            self.pool, self.pending = fit(self.pool + self.pending, self.pool_bytes), []

    def candidates(self, handle: int) -> list[Candidate]:
        prompt, text = self.running[handle]
        query = context(text, len(text))
        both = self.own(text, query) + self.from_window(self.windows.get(prompt, []), query)
        both.sort(key=lambda candidate: -candidate.length)
        longest = both[0].length if both else 0
        pool = self.from_window(self.pool, query) if longest <= SILENT else []
        longer = [candidate for candidate in pool if candidate.length > longest]
        return (longer + both)[: WINDOW_CANDIDATES + OWN_CANDIDATES]

    def from_window(self, window: list[Rollout], query: tuple[int, ...]) -> list[Candidate]:
        places = sorted(
            (context(rollout.tokens, at), -number, -at)
            for number, rollout in enumerate(window)
            for at in range(max(rollout.border, 1), len(rollout.tokens))
        )
        right = bisect_left(places, query, key=lambda place: place[0])
        left = right - 1
        found: list[Any] = []
        while len(found) < WINDOW_CANDIDATES:
            before = common(places[left][0], query) if left >= 0 else 0
            after = common(places[right][0], query) if right < len(places) else 0
            if max(before, after) == 0:
                break
            _, number, at = places[right if after >= before else left]
            left, right = (left, right + 1) if after >= before else (left - 1, right)
            rollout = window[-number]
            age = min(max(self.version - rollout.version, 0), 63)
            weight = np.float32(float(np.float32(self.decay)) ** age)
            found.append(Candidate(rollout.tokens[-at:], max(before, after), weight, False))
        return found

    def own(self, text: list[int], query: tuple[int, ...]) -> list[Candidate]:
        """The nearest contexts on either side of the query, as far out as each is newer than all nearer ones."""
        newest = {context(text, at): at for at in range(1, len(text))}
        oldest = newest[query] if len(query) == CONTEXT and query in newest else 0
        places = sorted(newest.items())
        right = bisect_left(places, query, key=lambda place: place[0])
        path = []
        for side in (reversed(places[:right]), iter(places[right:])):
            latest = oldest - 1
            for other, at in side:
                if at > latest:
                    latest = at
                    path.append((common(other, query), at))
        found = sorted(((length, at) for length, at in path if length), reverse=True)[:OWN_CANDIDATES]
        return [Candidate(text[at:], length, OWN_WEIGHT, True) for length, at in found]

    def chain(
        self, handle: int, depth: int, min_probability: float, factor: float
    ) -> tuple[list[int], list[np.float32]]:
        candidates = self.candidates(handle)
        best: tuple[np.float32, list[int], list[np.float32]] = (np.float32(0), [], [])
        for match in sorted({candidate.length for candidate in candidates}, reverse=True)[:LEVELS]:
            active = [candidate for candidate in candidates if candidate.length >= match]
            weights = {id(c): c.weight * LEVEL[c.length] for c in active}
            scale = np.float32(1) / _sum(weights[id(c)] for c in active)
            tokens: list[int] = []
            probs: list[np.float32] = []
            while len(tokens) < min(depth, int(match * factor)):
                sums = _group(active, weights, tokens)
                if not sums:
                    break
                token = max(sums, key=lambda t: sums[t])
                probability = sums[token] * scale
                if probability < np.float32(min_probability):
                    break
                active = [candidate for candidate in active if candidate.proposal(tokens) == token]
                tokens.append(token)
                probs.append(min(np.float32(1), probability))
            score = _sum(probs)
            if score > best[0]:
                best = score, tokens, probs
        return best[1], best[2]

    def tree(
        self, handle: int, depth: int, top_k: int, nodes: int, min_probability: float, factor: float
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents."""
        candidates = self.candidates(handle)
        weights = {id(c): c.weight * TREE[c.length] for c in candidates}
        total = _sum(weights[id(c)] for c in candidates)
        frontier: list[tuple[np.float32, list[Candidate], list[int], int]] = []
        drafted: list[int] = []
        parents: list[int] = []
        active, path, index = candidates, list[int](), -1
        while True:
            usable = [c for c in active if int(c.length * factor) > len(path)] if len(path) < depth else []
            sums = _group(usable, weights, path)
            for token in sorted(sums, key=lambda t: -sums[t])[:top_k]:
                if sums[token] >= np.float32(min_probability) * total:
                    agree = [c for c in usable if c.proposal(path) == token]
                    frontier.append((sums[token], agree, [*path, token], index))
            if len(drafted) == nodes or not frontier:
                return drafted, parents
            place = max(range(len(frontier)), key=lambda i: frontier[i][0])
            _, active, path, parent = frontier.pop(place)
            drafted.append(path[-1])
            parents.append(parent)
            index = len(drafted) - 1


def _sum(values: Iterable[np.float32]) -> np.float32:
    total = np.float32(0)
    for value in values:
        total += value
    return total


def _group(active: list[Candidate], weights: dict[int, np.float32], path: list[int]) -> dict[int, np.float32]:
    sums: dict[int, np.float32] = {}
    for candidate in active:
        token = candidate.proposal(path)
        if token is not None:
            sums[token] = sums.get(token, np.float32(0)) + weights[id(candidate)]
    return sums
