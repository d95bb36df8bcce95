"""Bookkeeping of one `run`: the holder, the prefix and the retries of every request. Sans-IO: no Ray, no clock.

Invariants (property-tested):
- every request is in exactly one of waiting, running (on one worker), finished, failed; nothing is lost;
- a request finishes or fails once, even if a worker repeats an event after a loss; nothing is counted twice;
- a re-issued request carries the tokens and log-probs that the lost worker had reported, under the same noise key, so
  that with a batch-invariant engine (Capabilities) the tokens do not depend on which worker finishes it;
- the cost of an event depends on what it changes, not on the number of open requests.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from actors.engine.stopping import End, find_end
from contracts.rollout import NOTHING_SAMPLED, FinishReason, IntArray, Request, Rollout, Sampled
from policies.balance import Balance, exact


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request without a response: rejected by the engine, or lost more often than `max_retries`."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loss:
    """The outcome of a worker's loss for its requests."""

    reissued: tuple[int, ...]
    failed: tuple[FailedRequest, ...]
    finished: tuple[Rollout, ...]  # already complete, or aborted; only the worker's last report was missing
    prefix_tokens: int  # sampled before the loss, and not sampled again


@dataclass(slots=True, kw_only=True)
class _LedgerEntry:
    request: Request
    expected: float  # tokens, whole response
    deltas: list[Sampled] = field(default_factory=list)
    tokens: int = 0  # of all deltas
    retries: int = 0
    aborted: bool = False  # aborted by the caller: it is not re-issued
    probe: bool = False  # first request of its prompt, if probes go first
    holder: str | None = None  # worker; None: waiting

    def remaining_tokens(self) -> float:
        """Return the expected remaining tokens, at least 1, so that no running request counts as free."""
        return max(self.expected - self.tokens, 1.0)

    def sampled(self) -> Sampled:
        """Return all reported tokens."""
        if len(self.deltas) > 1:
            self.deltas = [Sampled.join(self.deltas)]
        return self.deltas[0] if self.deltas else NOTHING_SAMPLED

    def issue(self) -> Request:
        return replace(self.request, prefix=self.sampled()) if self.deltas else self.request

    def ended(self) -> End | None:
        """Return the response's end, if the reported tokens are complete or the request was aborted."""
        end = find_end(self.request, self.sampled().tokens, self.request.sampling.max_new_tokens)
        return End(self.tokens, FinishReason.ABORT) if end is None and self.aborted else end


class Ledger:
    """The requests of one `run`. Request ids must be distinct."""

    def __init__(self, requests: Iterable[Request], *, max_retries: int, probes: bool = False) -> None:
        """`probes`: hand out the first request of each prompt before the others. When it has ended, the waiting
        requests of its prompt get its length as their expectation."""
        self._open: dict[int, _LedgerEntry] = {}
        self._held: dict[str, dict[int, _LedgerEntry]] = {}  # by worker
        self._placed: list[_LedgerEntry] = []  # running from the next decision on, on the worker that they had
        self._balance = Balance()
        self._max_retries = max_retries
        self._probes, self._siblings = probes, dict[int, list[int]]()  # by prompt: requests behind the probe
        self._later: dict[int, _LedgerEntry] = {}  # these wait until the probes are handed out
        self.total = self.finished = 0
        for request in requests:
            self.add(request)
        self.failed: list[FailedRequest] = []
        self.reissued = 0
        self.duplicates = 0  # events for a request that its sender does not hold (any more)

    def add(self, request: Request, worker: str | None = None) -> None:
        """Add a request. `worker`: the one that finished this id before, whose next turn this is. It counts once, and
        continues there if possible. Raises ValueError if the id is open."""
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id} occurs twice")
        entry = _LedgerEntry(request=request, expected=exact(request.expected_tokens))
        if request.prefix is not None:
            entry.deltas, entry.tokens = [request.prefix], len(request.prefix.tokens)
        self._open[request.request_id] = entry
        remaining = entry.remaining_tokens()
        if worker is None:
            self.total += 1
        else:
            self.finished -= 1
        context = len(request.prompt_tokens)
        if worker is not None and self._balance.go_on(worker, request.prompt_id, remaining, context):
            entry.holder = worker
            self._held.setdefault(worker, {})[request.request_id] = entry
            self._placed.append(entry)
        elif (siblings := self._siblings.get(request.prompt_id)) is not None:
            siblings.append(request.request_id)
            self._later[request.request_id] = entry
        else:
            if self._probes:
                entry.probe, self._siblings[request.prompt_id] = True, []
            self._balance.wait(request.prompt_id, request.request_id, remaining)

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def waiting(self) -> int:
        """The number of requests that no worker holds."""
        return self._balance.waiting + len(self._later)

    @property
    def waiting_tokens(self) -> float:
        """Their expected tokens."""
        return self._balance.waiting_tokens + sum(entry.remaining_tokens() for entry in self._later.values())

    def running(self, worker: str) -> Collection[int]:
        """Return the ids of the worker's requests, as a view."""
        return self._held.get(worker, {}).keys()

    def offer(self, worker: str, slots: int) -> None:
        """Declare that the worker can run `slots` requests at once."""
        self._balance.offer(worker, slots)

    def withdraw(self, worker: str) -> None:
        """Give the worker nothing more until it is offered again. It keeps its requests until it is lost."""
        self._balance.withdraw(worker)

    def assign(self) -> dict[str, list[Request]]:
        """Assign waiting requests to workers with free slots. Records the holders."""
        issued: dict[str, list[Request]] = {}
        placed, self._placed = self._placed, []
        for entry in placed:
            if entry.holder is not None and entry.request.request_id in self._open:  # otherwise it was lost meanwhile
                issued.setdefault(entry.holder, []).append(entry.issue())
        grants = self._balance.grants()
        if self._later and not self._balance.waiting:
            self._all_wait()
            grants += self._balance.grants()
        for grant in grants:
            held = self._held.setdefault(grant.worker, {})
            for request_id in grant.request_ids:
                entry = held[request_id] = self._open[request_id]
                entry.holder = grant.worker
                issued.setdefault(grant.worker, []).append(entry.issue())
        return issued

    def progress(self, worker: str, request_id: int, delta: Sampled) -> bool:
        """Store new tokens of a running request. Returns false if the worker does not hold it."""
        entry = self._of(worker, request_id)
        if entry is not None:
            entry.deltas.append(delta)
            self._sampled(worker, entry, entry.tokens + len(delta.tokens))
        return entry is not None

    def tokens(self, request_id: int) -> int:
        """Return the number of known tokens of an open request. Raises KeyError."""
        return self._open[request_id].tokens

    def tail(self, request_id: int, first: int) -> IntArray:
        """Return the known tokens of an open request from number `first` on. Raises KeyError."""
        entry, parts = self._open[request_id], list[IntArray]()
        end = entry.tokens
        for delta in reversed(entry.deltas):
            if end <= first:
                break
            begin = end - len(delta.tokens)
            parts.append(delta.tokens[max(first - begin, 0) :])
            end = begin
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def holders(self, prompt_id: int) -> Collection[str]:
        """Return the workers that run requests of the prompt."""
        return self._balance.holders(prompt_id)

    def shared_prompt(self, request_id: int) -> int | None:
        """Return the prompt of an open request, if several workers run requests of it. None for a turn of an episode,
        whose text is not a response to the prompt alone."""
        entry = self._open.get(request_id)
        if entry is None or entry.request.continues or entry.request.earlier_tokens:
            return None
        prompt_id = entry.request.prompt_id
        return prompt_id if len(self._balance.holders(prompt_id)) > 1 else None

    def begun(self, worker: str, prompt_id: int) -> list[int]:
        """Return the worker's requests of the prompt with known tokens."""
        held = self._held.get(worker, {})
        return [i for i, entry in held.items() if entry.request.prompt_id == prompt_id and entry.tokens]

    def hand_back(self, worker: str, rollout: Rollout) -> None:
        """Store an aborted request with all its tokens, which include those reported before. Its worker keeps it until
        it is lost."""
        entry = self._of(worker, rollout.request_id)
        if entry is not None and len(rollout.tokens):
            entry.deltas = [rollout.sampled]
            self._sampled(worker, entry, len(rollout.tokens))

    def finish(self, worker: str, rollout: Rollout) -> bool:
        """Finish a request. Returns true exactly once per request: only then may the caller use the rollout."""
        entry = self._of(worker, rollout.request_id)
        if entry is None:
            return False
        self._release(entry)
        del self._open[rollout.request_id]
        self.finished += 1
        if entry.probe and rollout.finish_reason is not FinishReason.ABORT:
            self._expect(entry.request.prompt_id, exact(len(rollout.tokens)))
        return True

    def _all_wait(self) -> None:
        """The probes are handed out: queue the other requests."""
        for request_id, entry in self._later.items():
            self._balance.wait(entry.request.prompt_id, request_id, entry.remaining_tokens())
        self._later.clear()

    def _expect(self, prompt_id: int, tokens: float) -> None:
        """Set the expected tokens of the prompt's waiting requests."""
        for request_id in self._siblings[prompt_id]:
            entry = self._open.get(request_id)
            if entry is None or entry.holder is not None:
                continue
            if request_id not in self._later:
                self._balance.forget(prompt_id, request_id)
                self._balance.wait(prompt_id, request_id, max(tokens - entry.tokens, 1.0))
            entry.expected = tokens

    def abort(
        self, request_ids: Iterable[int], *, now_s: float, weights_version: int
    ) -> tuple[list[Rollout], dict[str, list[int]]]:
        """Abort these requests; ids that are not open are ignored. Returns the rollouts of those that no worker runs,
        and the others' ids by worker. Those return through `finish`, or through `lose` with what was reported."""
        ended: list[Rollout] = []
        running: dict[str, list[int]] = {}
        for request_id in request_ids:
            entry = self._open.get(request_id)
            if entry is None or entry.aborted:
                continue
            entry.aborted = True
            if entry.holder is not None:
                running.setdefault(entry.holder, []).append(request_id)
            elif (end := entry.ended()) is not None:
                if self._later.pop(request_id, None) is None:
                    self._balance.forget(entry.request.prompt_id, request_id)
                ended.append(self._finish(entry, end, now_s, weights_version))
        return ended, running

    def hold_back(self) -> None:
        """Queue again what `add` has placed and `assign` has not handed out."""
        for entry in self._placed:
            if entry.holder is not None:
                self._release(entry)
                self._balance.wait(entry.request.prompt_id, entry.request.request_id, entry.remaining_tokens())
        self._placed.clear()

    def reject(self, worker: str, request_id: int, reason: str) -> FailedRequest | None:
        entry = self._of(worker, request_id)
        if entry is None:
            return None
        self._release(entry)
        return self._fail(request_id, reason)

    def lose(self, worker: str, reason: str, *, now_s: float, weights_version: int, handed_over: bool = False) -> Loss:
        """Return all requests of the worker to the queue, with their known tokens. `reason`: for the failures.
        handed_over: the worker had to end, so no request is suspected of having crashed it."""
        reissued: list[int] = []
        failed: list[FailedRequest] = []
        finished: list[Rollout] = []
        prefix_tokens = 0
        for request_id in sorted(self.running(worker)):
            entry = self._open[request_id]
            self._release(entry)
            if (end := entry.ended()) is not None:
                finished.append(self._finish(entry, end, now_s, weights_version))
            elif not handed_over and entry.retries >= self._max_retries:
                failed.append(self._fail(request_id, f"lost {entry.retries + 1} times, the last time: {reason}"))
            else:
                entry.retries += not handed_over
                self._balance.wait(entry.request.prompt_id, request_id, entry.remaining_tokens())
                reissued.append(request_id)
                prefix_tokens += entry.tokens
        self.reissued += len(reissued)
        return Loss(tuple(reissued), tuple(failed), tuple(finished), prefix_tokens)

    def _of(self, worker: str, request_id: int) -> _LedgerEntry | None:
        entry = self._open.get(request_id)
        if entry is not None and entry.holder == worker:
            return entry
        self.duplicates += 1
        return None

    def _sampled(self, worker: str, entry: _LedgerEntry, tokens: int) -> None:
        """Record that `tokens` of a running request are known."""
        before = entry.remaining_tokens()
        entry.tokens = tokens
        self._balance.progress(worker, before - entry.remaining_tokens())

    def _release(self, entry: _LedgerEntry) -> None:
        """Record that its worker no longer runs it."""
        assert entry.holder is not None
        self._balance.end(entry.holder, entry.request.prompt_id, entry.remaining_tokens())
        del self._held[entry.holder][entry.request.request_id]
        entry.holder = None

    def _finish(self, entry: _LedgerEntry, end: End, now_s: float, weights_version: int) -> Rollout:
        """Finish a request that no worker returns."""
        del self._open[entry.request.request_id]
        self.finished += 1
        return Rollout(
            request_id=entry.request.request_id,
            sampled=entry.sampled().first(end.tokens),
            finish_reason=end.reason,
            weights_version=weights_version,
            started_s=now_s,
            finished_s=now_s,
            propensity=end.propensity,
        )

    def _fail(self, request_id: int, reason: str) -> FailedRequest:
        del self._open[request_id]
        self.failed.append(failure := FailedRequest(request_id, reason))
        return failure
