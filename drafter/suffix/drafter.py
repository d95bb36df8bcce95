"""The suffix drafter (DAS 4.1) behind the engine's drafter interface. Owns the calls; the index is native/suffix_*.

Requests with the same prompt share a problem, across RL steps and workers. There are three levels: a frozen window of
the problem's recent finished rollouts, the request's own growing text (with its prompt), and those of its siblings that
are under way, here or (as far as `hear` was told) on other workers. If they match at most one
token of context, as in a problem's first epoch, longer matches in the *pool* join the vote. The pool is a window over
recent rollouts of all problems, which DAS does not have (its Figure 6 compares either alone). A finished rollout joins
its problem's window before the problem's next draft, so that running siblings can use it. It joins the pool when enough
rollouts have accumulated. Windows and pools above `inline_tokens` are rebuilt in a background thread, while drafts
continue from the old one.
"""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config.speculation import SuffixOptions
from config.strategy import Strategy
from drafter.native_index import propose
from drafter.protocol import BatchView, Drafter, Drafts
from models.ops.native import kernels

_LOG = logging.getLogger(__name__)
_FILE = "suffix.index"
# Where accepted tokens were found, as native/suffix_text.h numbers it: in the request's own text, in siblings under way
# here or elsewhere, in finished rollouts of these weights or of older ones, in other problems' rollouts (the pool).
ORIGINS = ("own", "running", "elsewhere", "finished", "older", "pool")
_POOL_PARTS = 8  # the pool takes at most 1 / _POOL_PARTS of max_bytes


class SuffixDrafter(Drafter):
    """Drafts from occurrences of the request's last tokens: earlier in its own text, in its problem's window, else in
    the pool.

    slots, max_tokens: the shape of the engine's history. A chain is at most `match_factor` times as long as its match
    (on the demo two thirds of what 2 drafts beyond 1 is accepted). It ends where its estimated probability falls below
    options.min_probability; so does every path of a tree. Costs a few microseconds per step and about one per request,
    in one native call; almost nothing while other strategies run. Drafts are a pure function of the calls made, except
    while a background merge runs (500,000 tokens: some 10 ms). An `inline_tokens` larger than any window excludes that.

    Raises RuntimeError without the native extension.
    """

    name = "suffix"

    def __init__(
        self,
        options: SuffixOptions,
        slots: int,
        max_tokens: int,
        *,
        match_factor: float = 2.0,
        inline_tokens: int = 1 << 16,
    ) -> None:
        if kernels is None:
            raise RuntimeError("the suffix drafter needs the native extension: `pip install -e .` builds it")
        self._history_shape = (slots, max_tokens)
        self._min_probability = options.min_probability
        self._match_factor = match_factor
        self._version = 0
        self._prompts = [0] * slots  # tokens of each request's prompt
        self._index = kernels.Suffixes(
            slots,
            options.window_bytes,
            options.max_bytes // _POOL_PARTS if options.pool else 0,
            options.max_bytes,
            options.version_decay,
            inline_tokens,
            options.siblings,
        )
        self._reported, self._gain = [0] * len(ORIGINS), [0, 0, 0]

    @property
    def bytes(self) -> int:
        """Memory of all windows and the pool, which `max_bytes` limits."""
        return int(self._index.bytes)

    @property
    def live_bytes(self) -> int:
        """Memory of the running requests' texts, and of what was heard of their siblings."""
        return int(self._index.live_bytes)

    @property
    def problems(self) -> int:
        """Number of problems with a window or a running request."""
        return int(self._index.problems)

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        self._index.begin(slot, prompt_tokens)  # `propose` catches up with the response
        self._prompts[slot] = len(prompt_tokens)

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        self._index.settle(slot, tokens)
        self._index.finish(slot, False, self._version)
        if finished:
            # Only an episode's own turn: the others were published, and observations are not the model's text.
            self._index.publish(tokens[: self._prompts[slot]], tokens[prompt_length:], self._version)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """See `native_index.propose`."""
        return propose(self._index, self._history_shape, batch, strategy, self._min_probability, self._match_factor)

    def new_target(self, version: int) -> None:
        self._version = version
        self._index.set_version(version)

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        """Add rollouts that other workers finished, with about the present weights."""
        for prompt, response in zip(prompts, responses, strict=True):
            self._index.publish(prompt, response, self._version)

    def hear(self, slot: int, request_id: int, first: int, response: NDArray[np.int32]) -> None:
        self._index.hear(slot, request_id, first, response)

    def accepted_from(self) -> dict[str, int]:
        now = self._index.accepted
        gained = {name: a - b for name, a, b in zip(ORIGINS, now, self._reported, strict=True) if a > b}
        self._reported = now
        return gained

    def sibling_gain(self) -> tuple[int, int, int]:
        drafts, accepted, without = (a - b for a, b in zip(self._index.gain, self._gain, strict=True))
        self._gain = self._index.gain
        return drafts, accepted, without

    def save(self, directory: str) -> None:
        """Write windows and pool to `directory`, atomically. Raises RuntimeError naming the file."""
        self._index.save(str(Path(directory) / _FILE))

    def load(self, directory: str) -> None:
        path = Path(directory) / _FILE
        if not path.exists():
            _LOG.warning("no suffix index in %s: the suffix drafter starts empty", directory)
            return
        try:
            self._index.load(str(path))
            # The file has its own version, but a rollout's age is relative to the loaded weights.
            self._index.set_version(self._version)
        except RuntimeError as error:  # an older format too: its texts would soon be outdated anyway
            _LOG.warning("the suffix drafter goes on without its saved index: %s", error)
