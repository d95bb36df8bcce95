"""Lookahead: idle workers sample the next RL step with the weights they have (`rollout.lookahead`). Sans-IO: no Ray.

Owns the requests to look ahead at, their assignment to workers, and their text. The text goes with the real request as
`Request.early`, which an engine checks and never trusts. So losing anything here only costs time.

Ids count from FIRST_ID, above every batch's ids. So a worker's reports of such ids come here and never reach the ledger
of real requests. Engines treat such requests as an evaluation's: drafters do not learn from them, nothing of them is
recorded, and no window mixes steps of both kinds.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from contracts.rollout import EarlyUse, FinishReason, IntArray, Request, Rollout

FIRST_ID = 1 << 40


def is_early(request_id: int) -> bool:
    return request_id >= FIRST_ID


@dataclass(slots=True, kw_only=True)
class EarlyTally:
    """Counts since they were last taken, of real requests that have ended."""

    sampled: int = 0  # tokens sampled ahead
    spent_s: float = 0.0  # engine seconds of idle workers for that
    own_s: float = 0.0  # driver seconds: sending these requests, and aborting them
    responses: int = 0  # that came with early text
    tokens: int = 0  # of their early text
    stood: int = 0  # early tokens before the first difference
    drawn: int = 0  # tokens of those responses
    use: EarlyUse = field(default_factory=EarlyUse)


class EarlySampling:
    """The lookahead of one dispatcher. Without a plan it does nothing."""

    def __init__(self, *, meanwhile: bool = False) -> None:
        """`meanwhile`: workers also look ahead outside of runs, since nothing else needs their cores or devices."""
        self.meanwhile = meanwhile
        self.tally = EarlyTally()
        self._planned: Sequence[Request] | None = None
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # by noise key, in the order of the prompts
        self._wanted: dict[int, Request] = {}  # the plan by noise key, without requests that were issued since
        self._held: dict[str, dict[int, Request]] = {}  # by worker, by id
        self._aborted: dict[str, dict[int, Request]] = {}  # likewise: their text will still arrive
        self._just_ended: set[str] = set()  # workers whose last early request came before the window of its last steps
        self._texts: dict[int, IntArray] = {}  # by noise key
        self._given: dict[int, IntArray] = {}  # real requests of the present run, by id
        self._ids = count(FIRST_ID)

    def plan(self, requests: Sequence[Request]) -> None:
        """Set the samples for the next run to look ahead at. The run after it is sure to request them. In order."""
        self._planned = requests

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        """Start a run: return its requests, with the early text that exists."""
        self._given.clear()
        ready = [self._with_text(request) for request in requests]
        if self._planned is not None:
            wanted = {request.noise_key: request for request in self._planned}
            running = [*self._held.values(), *self._aborted.values()]
            flying = {request.noise_key for some in running for request in some.values()}
            self._texts = {key: text for key, text in self._texts.items() if key in wanted}
            self._waiting = OrderedDict((key, request) for key, request in wanted.items() if key not in flying)
            self._wanted, self._planned = wanted, None
        return ready

    def _with_text(self, request: Request) -> Request:
        self._waiting.pop(request.noise_key, None)
        self._wanted.pop(request.noise_key, None)
        text = self._texts.pop(request.noise_key, None)
        if text is None:
            text = request.early  # of a prompt that was postponed (rollout.rounds)
        if text is None:
            return request
        self._given[request.request_id] = text
        return replace(request, early=text)

    @property
    def wanting(self) -> bool:
        """Whether there is something to look ahead at."""
        return bool(self._waiting)

    def holds(self, worker: str) -> bool:
        """Whether the worker looks ahead."""
        return bool(self._held.get(worker))

    def has(self, worker: str) -> bool:
        """Whether the worker's last steps may have been early ones: it looks ahead, or its aborts are under way."""
        return self.holds(worker) or bool(self._aborted.get(worker))

    def sampled_in(self, worker: str, *, evaluation: bool) -> bool:
        """Return whether a window that the worker reports now has early steps. `evaluation`: the window's.

        Early requests are marked as an evaluation's, and no window has both kinds. The window of the last steps arrives
        after the text."""
        early = evaluation and (self.has(worker) or worker in self._just_ended)
        self._just_ended.discard(worker)
        return early

    def give(self, worker: str, most: int, workers: int) -> tuple[Request, ...]:
        """Return what the idle worker, one of `workers`, samples next: at most `most` requests at once. Text that
        already exists is checked and continued."""
        held = self._held.setdefault(worker, {})
        share = min(most, max(1, -(-(len(self._waiting) + sum(map(len, self._held.values()))) // max(workers, 1))))
        if 2 * len(held) > share:
            return ()
        given = []
        while self._waiting and len(held) < share:
            key, request = self._waiting.popitem(last=False)
            early = replace(request, request_id=next(self._ids), evaluation=True, early=self._texts.get(key))
            held[early.request_id] = early
            given.append(early)
        return tuple(given)

    def take_back(self, worker: str) -> tuple[int, ...]:
        """Return the ids that the worker must abort, since it gets real work or new weights. They return through
        `finished`."""
        held = self._held.pop(worker, {})
        if held:
            self._aborted.setdefault(worker, {}).update(held)
        return tuple(held)

    def lost(self, worker: str) -> None:
        """Requeue the requests of a lost worker. The text that it has not returned is lost, as are its last windows."""
        self._just_ended.discard(worker)
        for some in (self._held, self._aborted):
            for request in some.pop(worker, {}).values():
                self._again(request)

    def _again(self, request: Request) -> None:
        """Put the request before all others, unless it was issued meanwhile. Requests go in the order of
        their prompts."""
        if request.noise_key in self._wanted:
            self._waiting[request.noise_key] = self._wanted[request.noise_key]
            self._waiting.move_to_end(request.noise_key, last=False)

    def finished(self, worker: str, rollout: Rollout) -> None:
        """Keep the text of a request that was looked ahead at, complete or not. It is dropped if it comes too late."""
        request = self._held.get(worker, {}).pop(rollout.request_id, None)
        request = request or self._aborted.get(worker, {}).pop(rollout.request_id, None)
        if request is not None and not self.has(worker):
            self._just_ended.add(worker)
        if request is None or request.noise_key not in self._wanted:
            return
        if len(rollout.tokens):
            before = 0 if request.early is None else len(request.early)
            self.tally.sampled += max(len(rollout.tokens) - before, 0)
            self._texts[request.noise_key] = rollout.tokens
        if rollout.finish_reason is FinishReason.ABORT:
            self._again(request)

    def rejected(self, worker: str, request_id: int) -> None:
        """Drop a request that the worker's engine cannot sample. The real one fails too, and reports why."""
        for some in (self._held, self._aborted):
            some.get(worker, {}).pop(request_id, None)

    def ended(self, rollout: Rollout) -> None:
        """Count how much of a real request's early text was right."""
        text = self._given.pop(rollout.request_id, None)
        if text is None or rollout.finish_reason is FinishReason.ABORT:
            return
        both = min(len(text), len(rollout.tokens))
        differ = np.flatnonzero(text[:both] != rollout.tokens[:both])
        tally = self.tally
        tally.responses, tally.tokens = tally.responses + 1, tally.tokens + len(text)
        tally.stood += int(differ[0]) if len(differ) else both
        tally.drawn += len(rollout.tokens)

    def used(self, use: EarlyUse) -> None:
        """Count what an engine's steps made of early text, of real requests or of those looked ahead at."""
        self.tally.use = self.tally.use.plus(use)

    def take(self) -> EarlyTally:
        """Return the counts since the last call."""
        tally, self.tally = self.tally, EarlyTally()
        return tally
