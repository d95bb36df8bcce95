"""Replay held-out responses through suffix indexes, and count what their drafts would save. Never samples.

Every contender gets the same problems: the other responses are its window; the held-out one is drafted for and then
revealed, as in verification. All requests of a batch advance together. Contenders take turns step by step, so that
machine noise affects all. CPU time of the calling thread.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.tools.suffix_data import Problem, Tokens
from models.ops.native import kernels

MIN_PROBABILITY = 0.1
MIN_LIVE = 32  # requests that must be live for a step's time per request to count


UNLIMITED = 1 << 40  # bytes, or tokens


def suffixes(
    requests: int,
    *,
    window_bytes: int = UNLIMITED,
    pool_bytes: int = 0,
    decay: float = 1.0,
    inline_tokens: int = UNLIMITED,
    siblings: bool = False,
) -> Any:
    """Return the native index without a size limit; without a pool unless it gets bytes."""
    assert kernels is not None, "the native extension is not built"
    return kernels.Suffixes(requests, window_bytes, pool_bytes, UNLIMITED, decay, inline_tokens, siblings)


class Contender(Protocol):
    """An index with every problem's window, with one request per problem begun."""

    def draft(self, live: Sequence[int], texts: Sequence[Tokens]) -> tuple[list[list[int]], int]:
        """Draft chains for the live requests (with texts `texts` so far). Also returns the nanoseconds."""

    def append(self, live: Sequence[int], tokens: Sequence[Tokens]) -> int:
        """Add the tokens that the live requests gained. Returns nanoseconds."""


class Ours:
    """Our index. `prompt_context` False: rollouts are stored without the prompt tokens before them, as in the peer."""

    def __init__(self, problems: Sequence[Problem], held_out: int, tokens: int, prompt_context: bool = True) -> None:
        self._tokens = tokens
        self._index = suffixes(len(problems))
        for handle, problem in enumerate(problems):
            for number, sample in enumerate(problem.samples):
                if number != held_out:
                    self._index.publish(problem.prompt if prompt_context else self._name(handle), sample, 0)
            self._index.begin(handle, problem.prompt if prompt_context else self._name(handle))
            if not prompt_context:
                self.append([handle], [problem.prompt])
        self._index.flush()

    @staticmethod
    def _name(handle: int) -> Tokens:
        """Return a prompt that no text contains."""
        return np.array([(1 << 30) + handle], np.int32)

    def draft(self, live: Sequence[int], texts: Sequence[Tokens]) -> tuple[list[list[int]], int]:
        handles, budgets = np.array(live), np.full(len(live), self._tokens)
        start = time.thread_time_ns()
        shape = (len(live), self._tokens)
        tokens, parents, probs = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.float32)
        counts = np.empty(shape[0], np.int64)
        self._index.draft_batch(handles, budgets, self._tokens, 1, MIN_PROBABILITY, 1.0, tokens, parents, probs, counts)
        elapsed = time.thread_time_ns() - start
        return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)], elapsed

    def append(self, live: Sequence[int], tokens: Sequence[Tokens]) -> int:
        handles, packed = np.array(live), np.concatenate(tokens)
        offsets = np.cumsum([0, *map(len, tokens)])
        start = time.thread_time_ns()
        self._index.append_batch(handles, packed, offsets)
        return time.thread_time_ns() - start


class Arctic:
    """arctic-inference's SuffixDecodingCache, one per problem; a request's own response enters its local tree only."""

    def __init__(self, depth: int, problems: Sequence[Problem], held_out: int, tokens: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._depth, self._tokens = depth, tokens
        self._caches: list[Any] = []
        for problem in problems:
            cache = SuffixDecodingCache(max_tree_depth=depth)
            for number, sample in enumerate(problem.samples):
                if number != held_out:
                    cache.start_request(number, problem.prompt[:0])
                    cache.add_active_response(number, sample)
                    cache.stop_request(number)
            cache.start_request(-1, problem.prompt)
            cache.evict_cached_response(-1)
            self._caches.append(cache)

    def draft(self, live: Sequence[int], texts: Sequence[Tokens]) -> tuple[list[list[int]], int]:
        contexts = [text[-self._depth :] for text in texts]
        start = time.thread_time_ns()
        drafts = [
            self._caches[i].speculate(-1, context, self._tokens, 1.0, 0.0, MIN_PROBABILITY).token_ids
            for i, context in zip(live, contexts, strict=True)
        ]
        return drafts, time.thread_time_ns() - start

    def append(self, live: Sequence[int], tokens: Sequence[Tokens]) -> int:
        start = time.thread_time_ns()
        for i, gained in zip(live, tokens, strict=True):
            self._caches[i].add_active_response(-1, gained)
        return time.thread_time_ns() - start


@dataclass
class Counts:
    """Counts of one contender: per-problem sums, and times per request (draft) and per token (append)."""

    steps: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    draft_us: list[float] = field(default_factory=list)
    append_us: list[float] = field(default_factory=list)


class _Replay:
    """One contender's requests, each as far as it has advanced."""

    def __init__(self, contender: Contender, problems: Sequence[Problem], held_out: int, counts: Counts) -> None:
        self.contender, self.counts = contender, counts
        self._truths = [problem.samples[held_out] for problem in problems]
        self._texts = [np.concatenate((p.prompt, t)) for p, t in zip(problems, self._truths, strict=True)]
        self._prompts = [len(problem.prompt) for problem in problems]
        self._done = [0] * len(problems)
        self._live = list(range(len(problems)))
        self._sums = np.zeros((len(problems), 3), np.int64)  # steps, accepted, proposed

    def step(self) -> bool:
        """Draft and reveal once. Returns false when every response is complete; then the sums are in the counts."""
        live = self._live
        texts = [self._texts[i][: self._prompts[i] + self._done[i]] for i in live]
        drafts, draft_ns = self.contender.draft(live, texts)
        gained = []
        for i, draft in zip(live, drafts, strict=True):
            truth = self._truths[i][self._done[i] :]
            accepted = 0
            while accepted < min(len(draft), len(truth)) and draft[accepted] == truth[accepted]:
                accepted += 1
            gained.append(truth[: accepted + 1])
            self._sums[i] += (1, accepted, len(draft))
            self._done[i] += accepted + 1
        append_ns = self.contender.append(live, gained)
        if len(live) >= MIN_LIVE:
            self.counts.draft_us.append(draft_ns / 1e3 / len(live))
            self.counts.append_us.append(append_ns / 1e3 / sum(map(len, gained)))
        self._live = [i for i in live if self._done[i] < len(self._truths[i])]
        if not self._live:
            for column, values in enumerate((self.counts.steps, self.counts.accepted, self.counts.proposed)):
                values.extend(self._sums[:, column].tolist())
        return bool(self._live)


def replay(
    problems: Sequence[Problem],
    held_out: int,
    contenders: dict[str, Callable[[Sequence[Problem], int], Contender]],
    counts: dict[str, Counts],
) -> None:
    """Add to `counts` each contender's results for sample `held_out` of every problem, in one batch."""
    replays = [_Replay(make(problems, held_out), problems, held_out, counts[name]) for name, make in contenders.items()]
    while replays:
        replays = [each for each in replays if each.step()]
        replays = replays[1:] + replays[:1]
