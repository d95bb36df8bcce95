"""Per-request state of the running batch as arrays over slots. Holds data; makes no decisions.

A slot is one place in the running batch. All per-step state of requests is here, so that a step is a few array
operations. Python runs per request only when one is admitted, reports or finishes.
"""

import numpy as np
from numpy.typing import NDArray

from contracts.rollout import Progress, Request, Sampled, StopRule


class SlotTable:
    """`slots` x state. Invariant of a used slot: 0 <= computed < length <= limit <= max_tokens.

    Array addresses are fixed, because native kernels hold them, except `stop`, which may grow.
    """

    def __init__(self, slots: int, max_tokens: int, blocks_per_slot: int, *, logprobs_t1: bool = True) -> None:
        """`logprobs_t1` False: the engine has none; the array exists but has no meaning."""

        def zeros() -> NDArray[np.int64]:
            return np.zeros(slots, np.int64)

        self._has_t1 = logprobs_t1
        # At position p of the sequence: its token, and for responses the log-probs of its draw. Zero pages use no
        # memory until they are written, so a large `max_tokens` costs nothing here.
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        self.logprobs = np.zeros((slots, max_tokens), np.float32)
        self.logprobs_t1 = np.zeros((slots, max_tokens), np.float32)
        self.block_tables = np.zeros((slots, blocks_per_slot), np.int32)
        self.block_counts = zeros()
        self.length = zeros()  # tokens known
        self.computed = zeros()  # tokens whose K/V are in the cache
        self.limit = zeros()  # length at which the request ends
        self.prompt_length = zeros()
        self.noise_origin = zeros()  # position of the first draw: prompt_length, in an episode's first turn
        self.reported = zeros()  # length at the last Progress
        self.spared_steps = zeros()  # tokens that shared an engine step with an earlier one
        self.drafted = zeros()  # drafted tokens verified since the last count ...
        self.accepted = zeros()  # ... and how many were accepted
        self.request_id = zeros()
        self.prompt_id = zeros()
        self.noise_key = zeros()
        self.evaluation = np.zeros(slots, np.bool_)
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = zeros()
        self.top_p = np.ones(slots, np.float32)
        self.stop = np.full((slots, 1), -1, np.int64)  # [slots, n_stop], padded with -1
        self.rules: list[StopRule | None] = [None] * slots
        self.early: list[NDArray[np.int32] | None] = [None] * slots

    def fill(self, slot: int, request: Request, prefix: Sampled | None, reported_tokens: int, limit: int) -> None:
        """Load a request into a free slot; `prefix` holds the existing response tokens."""
        prompt = len(request.prompt_tokens)
        length = prompt
        self.tokens[slot, :prompt] = request.prompt_tokens
        if prefix is not None:
            length += len(prefix.tokens)
            self.tokens[slot, prompt:length] = prefix.tokens
            self.logprobs[slot, prompt:length] = prefix.logprobs
            if self._has_t1:
                assert prefix.logprobs_t1 is not None, "taken in without them (intake)"
                self.logprobs_t1[slot, prompt:length] = prefix.logprobs_t1
        self.length[slot], self.computed[slot], self.limit[slot] = length, 0, limit
        self.prompt_length[slot], self.reported[slot] = prompt, prompt + reported_tokens
        self.noise_origin[slot] = prompt - request.earlier_tokens
        self.spared_steps[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.request_id[slot], self.prompt_id[slot] = request.request_id, request.prompt_id
        self.noise_key[slot] = np.uint64(request.noise_key & (2**64 - 1)).astype(np.int64)
        self.evaluation[slot] = request.evaluation
        sampling = request.sampling
        self.temperature[slot] = sampling.temperature
        self.top_k[slot], self.top_p[slot] = sampling.top_k, sampling.top_p
        missing = len(sampling.stop_token_ids) - self.stop.shape[1]
        if missing > 0:
            self.stop = np.pad(self.stop, ((0, 0), (0, missing)), constant_values=-1)
        self.rules[slot], self.early[slot] = request.stop, request.early
        self.stop[slot] = -1
        self.stop[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def response(self, slot: int, start: int | None = None) -> Sampled:
        """Return a copy of the response tokens and log-probs from sequence position `start` (default: all) on."""
        part = slice(int(self.prompt_length[slot]) if start is None else start, int(self.length[slot]))
        logprobs_t1 = self.logprobs_t1[slot, part].copy() if self._has_t1 else None
        return Sampled(self.tokens[slot, part].copy(), self.logprobs[slot, part].copy(), logprobs_t1)

    def progress(self, slot: int) -> Progress:
        """Return the tokens since the last report, and mark them as reported."""
        delta = self.response(slot, start=int(self.reported[slot]))
        self.reported[slot] = self.length[slot]
        return Progress(int(self.request_id[slot]), delta)

    def blocks(self, slot: int) -> list[int]:
        return [int(block) for block in self.block_tables[slot, : self.block_counts[slot]]]

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        count = int(self.block_counts[slot])
        self.block_tables[slot, count : count + len(blocks)] = blocks
        self.block_counts[slot] = count + len(blocks)
