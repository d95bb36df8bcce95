"""The requests of the present `run`: their assignment to workers, their outcomes and the notification of these.

Owns the ledger and the counts. `workers` owns the workers and their states.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actors.context import Context
from contracts.engine import Abort, SiblingText, Submit
from contracts.rollout import Finished, FinishReason, Request, Rollout, Sampled
from launch.dispatch.early import EarlySampling, is_early
from launch.dispatch.events import RolloutProgressed, WorkerChanged
from launch.dispatch.ledger import FailedRequest, Ledger
from launch.dispatch.seat import Seat, SeatState
from launch.dispatch.siblings import Siblings
from launch.errors import PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStats:
    """Results of one `run`. finished + len(failed) == requests, unless interrupted."""

    requests: int
    finished: int
    failed: tuple[FailedRequest, ...]
    reissued: int  # re-issues after lost workers, and from workers that left
    lost_workers: int
    duplicates: int  # events ignored because their sender no longer held the request
    tokens: int  # response tokens of the finished rollouts
    preempted: int  # recomputed by engines that ran out of cache
    seconds: float
    sampled_by: Mapping[int, str]  # request id -> the worker that finished it; "": aborted while it waited
    interrupted: bool = False
    reissued_ids: frozenset[int] = frozenset()  # requests that more than one worker sampled


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts of the present run, besides those of the ledger."""

    begin_s: float = 0.0
    lost_workers: int = 0
    tokens: int = 0
    preempted: int = 0
    sampled_by: dict[int, str] = field(default_factory=dict)
    reissued_ids: set[int] = field(default_factory=set)

    def finished(self, worker: str, rollout: Rollout) -> None:
        self.tokens += len(rollout.tokens)
        self.sampled_by[rollout.request_id] = worker

    def stats(self, ledger: Ledger, now_s: float, *, interrupted: bool) -> DispatchStats:
        return DispatchStats(
            requests=ledger.total,
            finished=ledger.finished,
            failed=tuple(ledger.failed),
            reissued=ledger.reissued,
            lost_workers=self.lost_workers,
            duplicates=ledger.duplicates,
            tokens=self.tokens,
            preempted=self.preempted,
            seconds=now_s - self.begin_s,
            sampled_by=self.sampled_by,
            interrupted=interrupted,
            reissued_ids=frozenset(self.reissued_ids),
        )


class Requests:
    """The requests of one dispatcher, one run after the other. Each end is posted as Finished."""

    def __init__(
        self,
        *,
        max_retries: int,
        context: Context,
        early: EarlySampling,
        probes: bool = False,
        shares_texts: bool = False,
    ) -> None:
        """`probes`: one request of each prompt goes before the others (Ledger). `shares_texts`: workers receive
        texts of groups that they share."""
        self._max_retries, self._context, self.early, self._probes = max_retries, context, early, probes
        self._version: int | None = None  # of the weights that every worker must hold, if any
        self._heard = False  # ends are posted
        self._watched = False  # ... and so is progress
        self._ledger = Ledger([], max_retries=0)
        self._tally = _Tally()
        self._shares_texts = shares_texts
        self._siblings: Siblings | None = None  # None: no texts are shared
        self.aborting = False

    def expect(self, version: int) -> None:
        """Set the weights version with which requests are sampled from now on."""
        self._version = version

    def begin(self, requests: Sequence[Request], *, watch: bool = False) -> None:
        """Start a run; workers must be offered again. `watch`: post progress as RolloutProgressed. Raises ValueError if
        two requests have one id."""
        self._tally = _Tally(begin_s=self._context.clock())
        self._ledger = Ledger(self.early.begin(requests), max_retries=self._max_retries, probes=self._probes)
        if self._shares_texts:
            self._siblings = Siblings(self._ledger, self._context)
        self._heard, self._watched = True, watch

    def abort_all(self) -> None:
        """Stop posting events, and hold back what is not handed out yet."""
        self._heard, self.aborting, self._siblings = False, True, None
        self._ledger.hold_back()

    def aborted_all(self) -> None:
        """Forget what still waits, once nothing runs any more."""
        self._ledger, self.aborting = Ledger([], max_retries=0), False

    def end(self) -> None:
        """End the run: post nothing more."""
        self._heard, self._siblings = False, None

    @property
    def waiting(self) -> tuple[int, float]:
        """The number of requests that no worker has, and their expected tokens."""
        return self._ledger.waiting, self._ledger.waiting_tokens

    @property
    def done(self) -> bool:
        return self._ledger.done

    def stats(self, *, interrupted: bool) -> DispatchStats:
        return self._tally.stats(self._ledger, self._context.clock(), interrupted=interrupted)

    def offer(self, worker: str, slots: int) -> None:
        """Declare that the worker can run `slots` requests at once; 0: give it nothing more."""
        if slots:
            self._ledger.offer(worker, slots)
        else:
            self._ledger.withdraw(worker)

    def running(self, worker: str) -> Collection[int]:
        """Return the ids of the worker's requests, as a view."""
        return self._ledger.running(worker)

    def assign(self, seats: Mapping[str, Seat]) -> bool:
        """Send waiting requests to workers with free slots. Returns whether there were any."""
        assigned = self._ledger.assign()
        for name, requests in assigned.items():
            seat = seats[name]
            if len(self._ledger.running(name)) == len(requests):
                seat.progress_s = self._context.clock()  # it was idle: silence counts from now
            self.stop_early(seat)
            seat.give(Submit(tuple(requests)))
            if self._siblings is not None:
                self._siblings.assigned(name, [request.prompt_id for request in requests])
        return bool(assigned)

    def sibling_texts(self) -> Iterator[tuple[str, list[SiblingText]]]:
        """Yield, by worker, what is new of siblings that others sample. Call `texts_sent` for what was sent."""
        if self._siblings is not None:
            yield from self._siblings.due()

    def texts_sent(self, worker: str, texts: Sequence[SiblingText]) -> None:
        if self._siblings is not None:
            self._siblings.sent(worker, texts)

    def look_ahead(self, seats: Iterable[Seat], *, most: int, workers: int) -> None:
        """Have idle ones of these workers sample the next step while nothing waits: at most `most` requests each,
        shared among `workers`."""
        if not self.early.wanting or self._ledger.waiting or self.aborting:
            return
        if self._ledger.done and not self.early.meanwhile:
            return
        begin_s = self._context.clock()
        for seat in seats:
            if seat.state is not SeatState.READY or seat.retiring or self._ledger.running(seat.name):
                continue
            if requests := self.early.give(seat.name, most, workers):
                seat.give(Submit(requests))
        self.early.tally.own_s += self._context.clock() - begin_s

    def stop_early(self, seat: Seat) -> None:
        """Stop the worker's lookahead before its next step, since it gets real work or new weights."""
        begin_s = self._context.clock()
        if ids := self.early.take_back(seat.name):
            seat.give(Abort(ids))
            self.early.tally.own_s += self._context.clock() - begin_s

    def abort(self, request_ids: Iterable[int], seats: Mapping[str, Seat]) -> None:
        """See RolloutDispatcher.abort."""
        ended, running = self._ledger.abort(request_ids, now_s=self._context.wall(), weights_version=self._version or 0)
        for name, ids in running.items():
            if seats[name].state is SeatState.READY:  # otherwise it already returns all that it runs
                seats[name].give(Abort(tuple(ids)))
        self.complete("", ended)

    def abort_running(self, seat: Seat) -> bool:
        """Have the worker return what it runs, if it is up. Returns false if it runs nothing."""
        if seat.state is not SeatState.READY or not (running := self._ledger.running(seat.name)):
            return False
        seat.give(Abort(tuple(running)))
        return True

    def add(self, request: Request) -> None:
        """Add a request, or the next turn of a finished one."""
        self._ledger.add(request, self._tally.sampled_by.get(request.request_id))

    def progress(self, seat: Seat, request_id: int, delta: Sampled) -> None:
        """Store new tokens of a running request."""
        if is_early(request_id):
            return  # lookahead text comes as a whole
        if not self._ledger.progress(seat.name, request_id, delta):
            return
        if self._siblings is not None:
            self._siblings.progressed(seat.name, request_id)
        if self._watched and self._heard:
            self._context.loop.tell(RolloutProgressed(request_id, self._ledger.tokens(request_id)))

    def preempted(self, count: int) -> None:
        """Count requests that an engine must recompute because its cache was full."""
        self._tally.preempted += count

    def reject(self, seat: Seat, request_id: int, reason: str) -> None:
        """Fail a request that the worker's engine cannot sample."""
        if is_early(request_id):
            self.early.rejected(seat.name, request_id)
            return
        if (failure := self._ledger.reject(seat.name, request_id, reason)) is not None:
            self._context.observer.event("request_rejected", f"request {failure.request_id}: {failure.reason}")

    def finish(self, seat: Seat, rollout: Rollout) -> None:
        """The worker says that one has ended. Raises PacelineError: it was sampled with other weights, and
        must not be trained on."""
        if is_early(rollout.request_id):
            self.early.finished(seat.name, rollout)
            return
        if seat.state is SeatState.LEAVING and rollout.finish_reason is FinishReason.ABORT:
            self._ledger.hand_back(seat.name, rollout)
            seat.handed_back.add(rollout.request_id)
            return
        prompt_id = self._ledger.shared_prompt(rollout.request_id)
        if not self._ledger.finish(seat.name, rollout):
            return
        if self._siblings is not None and prompt_id is not None:
            self._siblings.ended(seat.name, rollout.request_id, prompt_id, rollout.tokens)
        expected = self._version
        if expected is not None and rollout.weights_version != expected and not self.aborting:
            raise PacelineError(
                f"{seat.name} sampled with weights version {rollout.weights_version}, although it answered that it "
                f"holds version {expected}",
                remedy="its rollouts must not be trained on: see its log",
            )
        self._ended(seat.name, rollout)

    def handed_back(self, seat: Seat) -> bool:
        """Whether a leaving worker has returned everything that it held."""
        return seat.handed_back.issuperset(self._ledger.running(seat.name))

    def take_back(self, seat: Seat, reason: str, *, told: bool = False) -> Sequence[Rollout]:
        """Queue the worker's requests for others, and report its loss unless that was `told`. Returns those of its
        rollouts that turn out to be complete."""
        wall_s = self._context.wall()
        self.early.lost(seat.name)
        loss = self._ledger.lose(
            seat.name,
            reason,
            now_s=wall_s,
            weights_version=self._version or 0,
            handed_over=seat.state is SeatState.LEAVING,
        )
        self._tally.reissued_ids.update(loss.reissued)
        again = f"{len(loss.reissued)} requests are re-issued with {loss.prefix_tokens} tokens"
        if seat.retiring:
            why = f"{seat.reason}; " if seat.reason else ""
            self._changed("worker_left", seat, f"{why}{again}")
        elif not told:
            self._tally.lost_workers += 1
            seat.reason = reason
            seat.down_since_wall_s = seat.down_since_wall_s or wall_s
            self._changed("worker_lost", seat, f"{reason}; {again}")
        self._tell_failed(loss.failed)
        return loss.finished

    def complete(self, worker: str, rollouts: Iterable[Rollout]) -> None:
        """End these requests without a worker's report. `worker`: "" if no worker ran them."""
        for rollout in rollouts:
            self._ended(worker, rollout)

    def _ended(self, worker: str, rollout: Rollout) -> None:
        self._tally.finished(worker, rollout)
        self.early.ended(rollout)
        if self._heard:
            self._context.loop.tell(Finished(rollout))

    def _changed(self, kind: str, seat: Seat, message: str) -> None:
        self._context.loop.tell(WorkerChanged(kind, seat.name, message))

    def _tell_failed(self, failed: Sequence[FailedRequest]) -> None:
        if failed:
            ids = ", ".join(str(failure.request_id) for failure in failed)
            self._context.observer.event("request_failed", f"requests {ids}: {failed[0].reason}")
