"""Who owns what during one `run`: the bookkeeping of requests, prefixes and retries. Sans-IO: no Ray, no clock.

Invariants (property-tested):
- every request is in exactly one of waiting, running (on one worker), finished, failed; nothing is lost;
- a request finishes or fails once, whatever a worker repeats after a loss; nothing is counted twice;
- what a lost worker had reported of a response (tokens and log-probs) goes with the re-issued request, under the same
  noise key, so that the tokens do not depend on who finishes it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from actors.engine.types import FinishReason, Request, Rollout, Sampled
from policies.balance import WaitingGroup, WorkerLoad, balance


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that has no response: rejected by the engine, or lost more often than `max_retries`."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of the requests of a lost worker."""

    reissued: tuple[int, ...]
    failed: tuple[FailedRequest, ...]
    finished: tuple[Rollout, ...]  # complete already; only the worker's last word was missing
    prefix_tokens: int  # sampled before the loss, and not sampled again


@dataclass(slots=True)
class _Entry:
    request: Request
    deltas: list[Sampled] = field(default_factory=list)
    retries: int = 0
    holder: int | None = None  # worker; None: waiting

    def tokens_so_far(self) -> int:
        return sum(len(d.tokens) for d in self.deltas)

    def remaining_tokens(self) -> float:
        """Expected, at least 1, so that no running request counts as free."""
        return max(self.request.expected_tokens - self.tokens_so_far(), 1.0)

    def issue(self) -> Request:
        return replace(self.request, prefix=Sampled.join(self.deltas)) if self.deltas else self.request

    def complete(self) -> FinishReason | None:
        """A reason if the reported tokens are already the whole response."""
        sampling = self.request.sampling
        if self.deltas and len(last := self.deltas[-1].tokens) and int(last[-1]) in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.tokens_so_far() >= sampling.max_new_tokens else None


class Ledger:
    """The requests of one `run`. Request ids must be distinct."""

    def __init__(self, requests: Iterable[Request], *, max_retries: int) -> None:
        self._open: dict[int, _Entry] = {}
        for request in requests:
            if request.request_id in self._open:
                raise ValueError(f"request id {request.request_id} occurs twice")
            deltas = [request.prefix] if request.prefix is not None else []
            self._open[request.request_id] = _Entry(request, deltas)
        self._max_retries = max_retries
        self.total = len(self._open)
        self.waiting = self.total  # requests that nobody holds
        self.finished = 0
        self.failed: list[FailedRequest] = []
        self.reissued = 0
        self.duplicates = 0  # events for a request that its sender does not hold (any more)

    @property
    def done(self) -> bool:
        return not self._open

    def running(self, worker: int) -> list[int]:
        """Request ids that the worker holds."""
        return [i for i, e in self._open.items() if e.holder == worker]

    def assign(self, slots: Mapping[int, int]) -> dict[int, list[Request]]:
        """Hand waiting requests to workers that can run `slots[worker]` requests at once; records who holds what."""
        if not self.waiting:
            return {}
        groups: dict[int, list[_Entry]] = {}
        held: dict[int, list[_Entry]] = {worker: [] for worker in slots}
        for entry in self._open.values():
            if entry.holder is None:
                groups.setdefault(entry.request.prompt_id, []).append(entry)
            elif entry.holder in held:
                held[entry.holder].append(entry)
        for group in groups.values():
            group.sort(key=lambda e: (-e.remaining_tokens(), e.request.request_id))
        grants = balance(
            [WaitingGroup(p, len(g), g[0].remaining_tokens()) for p, g in groups.items()],
            [
                WorkerLoad(
                    worker,
                    max(slots[worker] - len(entries), 0),
                    len(entries),
                    sum(e.remaining_tokens() for e in entries),
                    {e.request.prompt_id for e in entries},
                )
                for worker, entries in held.items()
            ],
        )
        issued: dict[int, list[Request]] = {}
        for grant in grants:
            group = groups[grant.prompt_id]
            for entry in group[: grant.count]:
                entry.holder = grant.worker
                issued.setdefault(grant.worker, []).append(entry.issue())
            del group[: grant.count]
            self.waiting -= grant.count
        return issued

    def progress(self, worker: int, request_id: int, delta: Sampled) -> bool:
        """Remember tokens of a running request; False if the worker does not hold it."""
        entry = self._held(worker, request_id)
        if entry is not None:
            entry.deltas.append(delta)
        return entry is not None

    def hand_back(self, worker: int, rollout: Rollout) -> None:
        """An aborted request, with all its tokens: what its worker had reported of it so far is a part of them. It is
        still the worker's, until that is lost."""
        entry = self._held(worker, rollout.request_id)
        if entry is not None and len(rollout.tokens):
            entry.deltas = [rollout.sampled]

    def finish(self, worker: int, rollout: Rollout) -> bool:
        """True exactly once per request: the caller may use the rollout."""
        if self._held(worker, rollout.request_id) is None:
            return False
        del self._open[rollout.request_id]
        self.finished += 1
        return True

    def reject(self, worker: int, request_id: int, reason: str) -> FailedRequest | None:
        if self._held(worker, request_id) is None:
            return None
        return self._fail(request_id, reason)

    def lose(self, worker: int, reason: str, *, now_s: float, weights_version: int) -> Loss:
        """Everything the worker holds goes back to the queue, with what is known of it; `reason` for the failures."""
        reissued: list[int] = []
        failed: list[FailedRequest] = []
        finished: list[Rollout] = []
        prefix_tokens = 0
        for request_id in self.running(worker):
            entry = self._open[request_id]
            if (finish_reason := entry.complete()) is not None:
                finished.append(
                    Rollout(
                        request_id=request_id,
                        sampled=Sampled.join(entry.deltas),
                        finish_reason=finish_reason,
                        weights_version=weights_version,
                        started_s=now_s,
                        finished_s=now_s,
                    )
                )
                del self._open[request_id]
                self.finished += 1
            elif entry.retries >= self._max_retries:
                failed.append(self._fail(request_id, f"lost {entry.retries + 1} times, the last time: {reason}"))
            else:
                entry.retries += 1
                entry.holder = None
                reissued.append(request_id)
                prefix_tokens += entry.tokens_so_far()
        self.reissued += len(reissued)
        self.waiting += len(reissued)
        return Loss(tuple(reissued), tuple(failed), tuple(finished), prefix_tokens)

    def _held(self, worker: int, request_id: int) -> _Entry | None:
        entry = self._open.get(request_id)
        if entry is not None and entry.holder == worker:
            return entry
        self.duplicates += 1
        return None

    def _fail(self, request_id: int, reason: str) -> FailedRequest:
        del self._open[request_id]
        self.failed.append(failure := FailedRequest(request_id, reason))
        return failure
