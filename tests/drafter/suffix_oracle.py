"""The suffix index by brute force: what native/suffix_*.h promises, read from sorted lists of all contexts."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONTEXT, BORDER = 64, 4
WINDOW_CANDIDATES, OWN_CANDIDATES, SIBLING_CANDIDATES, LEVELS = 16, 8, 8, 8
OWN_WEIGHT = np.float32(4)
SILENT, POOL_PARTS = 1, 16
INDEX_BYTES, ROLLOUT_BYTES, TOKEN_BYTES = 512, 128, 10
SIBLING_BYTES, SIBLING_TOKEN_BYTES = 40, 28  # of a group of texts under way
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
class Group:
    """Texts of one problem under way: [tokens, border, whether open], and places in the order of their insertion."""

    texts: list[Any] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # (text, place)
    elsewhere: dict[int, int] = field(default_factory=dict)  # text of another worker's request
    used: int = 0

    def open(self, prompt: list[int]) -> int:
        tail = prompt[-BORDER:] if prompt else []
        self.texts.append([list(tail), len(tail), True])
        self.used += SIBLING_BYTES + 4 * len(tail)
        return len(self.texts) - 1

    def append(self, text: int, tokens: list[int], limit: int) -> None:
        whole, border, _ = self.texts[text]
        fits = tokens[: max(limit - self.used, 0) // SIBLING_TOKEN_BYTES]
        begin = max(len(whole), border, 1)
        whole.extend(fits)
        self.used += SIBLING_TOKEN_BYTES * len(fits)
        self.places += [(text, at) for at in range(begin, len(whole))]

    @property
    def opened(self) -> int:
        return sum(text[2] for text in self.texts)


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
    siblings: bool = False
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)  # of handles' texts in their groups

    def begin(self, handle: int, prompt: list[int]) -> None:
        self.running[handle] = tuple(prompt), list(prompt)
        if self.siblings:
            self.numbers[handle] = self.groups.setdefault(tuple(prompt), Group()).open(prompt)

    def hear(self, handle: int, request: int, first: int, tokens: list[int]) -> None:
        prompt = self.running[handle][0]
        group = self.groups[prompt]
        if request not in group.elsewhere:
            group.elsewhere[request] = group.open(list(prompt))
        text = group.elsewhere[request]
        known = len(group.texts[text][0]) - group.texts[text][1]
        if first <= known:
            group.append(text, tokens[known - first :], self.window_bytes)

    def follow(self) -> None:
        """Before a round of drafts: the groups learn what their requests have gained."""
        for handle, number in self.numbers.items():
            prompt, text = self.running[handle]
            group = self.groups[prompt]
            if group.opened > 1:
                known = len(prompt) - group.texts[number][1] + len(group.texts[number][0])
                group.append(number, text[known:], self.window_bytes)

    def append(self, handle: int, tokens: list[int]) -> None:
        self.running[handle][1].extend(tokens)

    def finish(self, handle: int, keep: bool, version: int) -> None:
        prompt, text = self.running.pop(handle)
        if self.siblings:
            self.groups[prompt].texts[self.numbers.pop(handle)][2] = False
            if all(other != prompt for other, _ in self.running.values()):
                del self.groups[prompt]
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
        both = self.own(text, query)
        if self.siblings and self.groups[prompt].opened > 1:
            both += self.beside(self.groups[prompt], self.numbers[handle], query)
        both += self.from_window(self.windows.get(prompt, []), query)
        both.sort(key=lambda candidate: -candidate.length)
        longest = both[0].length if both else 0
        pool = self.from_window(self.pool, query) if longest <= SILENT else []
        longer = [candidate for candidate in pool if candidate.length > longest]
        return (longer + both)[: WINDOW_CANDIDATES + OWN_CANDIDATES + SIBLING_CANDIDATES]

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
        path = nearest({context(text, at): at for at in range(1, len(text))}, query, len(query) == CONTEXT)
        found = sorted(((length, at) for length, at in path if length), reverse=True)[:OWN_CANDIDATES]
        return [Candidate(text[at:], length, OWN_WEIGHT, True) for length, at in found]

    def beside(self, group: Group, mine: int, query: tuple[int, ...]) -> list[Candidate]:
        """The same over all texts of the group; then those of the request and those that are closed are left out."""
        newest = {context(group.texts[text][0], at): order for order, (text, at) in enumerate(group.places)}
        candidates = []
        for length, order in sorted(nearest(newest, query, True), reverse=True):
            text, at = group.places[order]
            if length and text != mine and group.texts[text][2]:
                candidates.append(Candidate(group.texts[text][0][at:], length, np.float32(1), False))
        return candidates[:SIBLING_CANDIDATES]

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


def nearest(newest: dict[tuple[int, ...], int], query: tuple[int, ...], ends: bool) -> list[tuple[int, int]]:
    """The nearest contexts on either side of the query, as far out as each is newer than all nearer ones, as (common
    length, order). `newest`: order of insertion by context. `ends`: an equal context hides all older ones."""
    oldest = newest[query] if ends and query in newest else -1
    places = sorted(newest.items())
    right = bisect_left(places, query, key=lambda place: place[0])
    path = []
    for side in (reversed(places[:right]), iter(places[right:])):
        latest = oldest - 1
        for other, order in side:
            if order > latest:
                latest = order
                path.append((common(other, query), order))
    return path


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
