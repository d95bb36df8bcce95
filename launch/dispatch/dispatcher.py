"""Dispatch of requests to workers: the reaction to each event of a worker.

Owns the handling of what arrives; `workers` owns each worker's state and its reason. Never looks at tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType
from typing import Any, assert_never

import ray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from actors.context import Context
from actors.incarnation import Leaving, WorkerEvent
from actors.learner_group import WeightsSending
from actors.rollout_worker import SupervisorStatus
from actors.spot_host import RecordingReport
from config.rollout import RolloutOptions
from contracts.engine import Sleep
from contracts.rollout import (
    DrafterFailed,
    EngineFailed,
    EngineWindow,
    Finished,
    GraphsFailed,
    PassEvent,
    Progress,
    Rejected,
    Request,
    WeightsLoaded,
)
from contracts.spot import Checkpointed, MicroStep, TrainedWeights, TrainFailed, TrainStopped
from launch.dispatch.early import EarlySampling
from launch.dispatch.events import WeightsGone, WorkerNews
from launch.dispatch.requests import DispatchStats, Requests
from launch.dispatch.seat import (
    FETCH_TIMEOUT_S,
    Deltas,
    Seat,
    SeatState,
    Weights,
    WorkerArrived,
    WorkerNow,
    WorkerStarts,
    node_lost,
    reason_of,
    some_are,
)
from launch.dispatch.seats import Seats
from launch.dispatch.weights import HandOver
from launch.dispatch.workers import Workers
from models.manifest import WeightsManifest
from policies.drafter.lineage import micro_steps

_ABORT_TIMEOUT_S = 10.0


class RolloutDispatcher:
    """See the package docstring. Not thread-safe. Every wait has a deadline and runs the event loop."""

    def __init__(
        self,
        starts: WorkerStarts,
        options: RolloutOptions,
        context: Context,
        *,
        start_timeout_s: float = 600.0,
        refused: Mapping[str, str] = MappingProxyType({}),
        ahead_meanwhile: bool = False,
        ahead_apart: bool = False,
    ) -> None:
        """`refused`: nodes (ids) where no worker may be now, and why. `ahead_meanwhile`: workers look ahead (`early`)
        outside of runs too. `ahead_apart`: only those on whose node no worker decodes."""
        self._context, self._options, self._ahead_apart = context, options, ahead_apart
        self.early = EarlySampling(meanwhile=ahead_meanwhile)
        speculation = options.speculation
        self._requests = Requests(
            max_retries=options.max_retries,
            context=context,
            early=self.early,
            probes=options.probe_first,
            shares_texts=speculation.mode != "off" and speculation.suffix.siblings,
        )
        self._seats = Seats(options, context, self._requests)
        self._workers = Workers(
            starts, self._seats, start_timeout_s=start_timeout_s, refused={} if refused is None else refused
        )
        self.drafters = self._workers.drafters

    def start(self) -> None:
        """Start all workers at once. Raises PacelineError: a worker that fails at first would fail again, unless its
        node was lost, or it was told to end: then another one is started."""
        self._workers.start()

    def join(self, name: str) -> None:
        """Start a worker, also during a run. It gets the weights and work as soon as it is up. Never waits. Raises
        ValueError unless the name is new, or that of a worker that has left or is dead."""
        self._workers.join(name)

    def leave(self, name: str, reason: str = "") -> None:
        """Let a worker go for good, also during a run. It returns its requests with all their tokens and closes its
        engine; no weights are awaited from it. Never waits. `reason`: for the event worker_left. Raises KeyError if
        there is no such worker."""
        self._workers.retire(name, reason)

    def workers(self) -> dict[str, WorkerNow]:
        """Return all workers by name."""
        return {
            name: WorkerNow(seat.state, len(self._requests.running(name)), seat.node_id, seat.retiring)
            for name, seat in self._seats.by_name.items()
        }

    @property
    def handing_back(self) -> bool:
        """Whether leaving workers are returning their requests. Bounded by 5 s of the time in which the
        driver listens."""
        return bool(self._seats.leaving)

    @property
    def listening(self) -> bool:
        """Whether a caller waits for workers."""
        return self._seats.listening > 0

    def unheard(self) -> AbstractContextManager[None]:
        """Wrap what blocks the driver for long: silence and lateness of workers in the block do not count
        against them."""
        return self._seats.unheard()

    @property
    def waiting(self) -> tuple[int, float]:
        """The number of requests of this run that no worker has, and their expected tokens."""
        return self._requests.waiting

    def set_weights(self, manifest: WeightsManifest, ref: "ObjectRef[Any]", deltas: Deltas | None = None) -> int:
        """Send weights to all workers at once and check each answer. `ref`: uint8 buffer in the object store.

        Returns when every worker that is up holds them, how many that are; one that fails or is too slow is lost, and
        gets them when it is back. Raises PacelineError: no worker is left, or one holds other weights."""
        self._stop_early()
        self._workers.loading.set(Weights(manifest, ref, deltas))
        self._hear_of_drafters()
        return sum(seat.state is SeatState.READY for seat in self._seats.by_name.values())

    @property
    def by_delta(self) -> int:
        """The number of workers that made the present weights from earlier ones and deltas."""
        return self._workers.loading.by_delta

    def elsewhere(self, home: str) -> bool:
        """Whether a worker is on another node than `home`."""
        return any(seat.node_id not in ("", home) for seat in self._seats.by_name.values())

    def renew_weights(self, manifest: WeightsManifest, ref: "ObjectRef[Any]") -> None:
        """Set another buffer with the weights that workers hold, made by another process, for workers that
        start later."""
        self._workers.loading.renew(Weights(manifest, ref))

    def hand_over(self, send: Callable[[int], WeightsSending], *, to_trainers: bool = False) -> HandOver:
        """Send weights as `set_weights` does, but piece by piece from the learner's devices; `send(receivers)` begins
        it. A worker that does not get them, or starts meanwhile, loads them from the object store at the end.
        `to_trainers`: workers train drafters. Raises as `set_weights`, and what the end of the learner's sending
        raises."""
        self._stop_early()
        handed = self._workers.loading.hand_over(send, to_trainers=to_trainers)
        self._hear_of_drafters()
        return handed

    def begin(self, requests: Sequence[Request], *, watch: bool = False) -> None:
        """Sample all of these requests. Until `end`, each is posted once as Finished. `watch`: progress is posted
        too, as RolloutProgressed. Raises ValueError if two have one id."""
        self._requests.begin(requests, watch=watch)
        self._workers.begin_run()
        self._assign()
        self._look_ahead(self._seats.by_name.values())

    @property
    def done(self) -> bool:
        """Whether every request has finished or failed."""
        return self._requests.done

    def wait(self, until: Callable[[], bool]) -> None:
        """For what workers do. Raises PacelineError as `set_weights`, and what the reactions raise."""
        self._seats.wait(until)

    def end(self, *, abort: bool) -> DispatchStats:
        """End the run that `begin` started and return its counts. `abort`: first abort what runs, so that the next run
        starts clean."""
        try:
            if abort:
                self.abort_all()
        finally:
            if abort or not self.early.meanwhile:
                self._stop_early()
            self._workers.end_run()
            self._requests.end()
        return self._requests.stats(interrupted=abort)

    def submit(self, request: Request) -> None:
        """Add a request to the present run. A request whose id has finished is its next turn, and goes to the worker
        that has its K/V if that is up. Raises ValueError if the id has not finished."""
        self._requests.add(request)

    def settle(self) -> None:
        """Handle what has arrived, such as the last window of the run before, and answers to new drafter weights; does
        not wait. Raises PacelineError: none is left."""
        self._seats.require_one()
        self._hear_of_drafters()
        self._context.loop.turn()

    def _assign(self) -> None:
        assigned = self._requests.assign(self._seats.by_name)
        self._share_texts()
        if assigned and self._ahead_apart:
            decoding = self._decoding_nodes()
            for seat in self._seats.by_name.values():
                if seat.node_id in decoding:
                    self._requests.stop_early(seat)

    def _decoding_nodes(self) -> set[str]:
        return {seat.node_id for seat in self._seats.by_name.values() if self._requests.running(seat.name)}

    def _look_ahead(self, seats: Iterable[Seat]) -> None:
        if self._ahead_apart:
            decoding = self._decoding_nodes()
            seats = [seat for seat in seats if seat.node_id not in decoding]
        if self._seats.running or self.early.meanwhile:
            most = self._options.engine.max_running
            self._requests.look_ahead(seats, most=most, workers=len(self._seats.by_name))

    def _stop_early(self) -> None:
        for seat in self._seats.by_name.values():
            self._requests.stop_early(seat)

    def sleep(self, timeout_s: float) -> dict[str, str]:
        """Have all engines release their KV cache until they get work. Returns why some did not, by worker. Lost
        workers are left out."""
        up = [s for s in self._seats.by_name.values() if s.state is SeatState.READY or s.waits_for_weights]
        asked: dict[ObjectRef[Any], str] = {seat.ask(Sleep()): seat.name for seat in up}
        ready, late = self._context.loop.answers(list(asked), timeout_s)
        awake = {asked[answer]: f"no answer in {timeout_s:g} s" for answer in late}
        for answer in ready:
            with suppress(RayError):
                if refusal := ray.get(answer, timeout=FETCH_TIMEOUT_S).refusal:
                    awake[asked[answer]] = refusal
        return awake

    def give_up(self, gone: WeightsGone) -> None:
        """Lose the worker, if it still waits for weights whose buffer no process will make again."""
        if gone.seat is not None and gone.error is not None and gone.seat.waits_for_weights:
            self._lost(gone.seat, gone.error)

    def _hear_of_drafters(self) -> None:
        for seat, weights in self.drafters.fetched():
            self._context.loop.tell(WorkerNews(seat.name, weights))
        for seat, loaded in self.drafters.updated():
            if loaded.reason:
                self._context.observer.event(
                    "drafter_not_updated",
                    f"{seat.name}: version {micro_steps(loaded.version)} of {loaded.name}: {loaded.reason}",
                )
            self._context.loop.tell(WorkerNews(seat.name, loaded))

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop sampling these requests. Each still ends once with its tokens, as ABORT or as it ended meanwhile: at
        once if no worker runs it, else when its worker reports it or is lost."""
        self._requests.abort(request_ids, self._seats.by_name)

    def abort_all(self) -> None:
        """Abort what runs and wait until the engines confirm. A worker that does not within 10 s is lost."""
        self._requests.abort_all()
        busy = []
        for seat in self._seats.by_name.values():
            self._handle_inbox(seat)
            if self._requests.abort_running(seat):
                busy.append(seat)
        deadline_s = self._context.clock() + _ABORT_TIMEOUT_S

        def runs(seat: Seat) -> bool:
            return seat.state is SeatState.READY and bool(self._requests.running(seat.name))

        def over() -> bool:
            if some_are(busy, runs) and self._context.clock() > deadline_s:
                for seat in filter(runs, busy):
                    self._workers.lose(seat, f"did not abort its requests within {_ABORT_TIMEOUT_S:g} s", alive=False)
                return True
            return not busy

        self._seats.wait(over)
        self._requests.aborted_all()

    def close(self) -> None:
        """Close the engines (bounded), then end the actors."""
        self._workers.close()

    # Reactions.

    def look(self) -> None:
        """Check the deadlines if it is time again, and hand out waiting requests."""
        if self._workers.overdue():
            self._hear_of_drafters()
        if not self._requests.aborting:
            self._assign()

    def receive(self, arrived: WorkerArrived) -> None:
        """Raises PacelineError: a worker did not start, or holds other weights."""
        seat, waitable, value = arrived.seat, arrived.waitable, arrived.value
        events: list[WorkerEvent] | None = []
        answer: SupervisorStatus | WeightsLoaded | None = None
        try:  # only for what the worker sends: a RayError of another part is not its fault
            if waitable is seat.stream:
                events = seat.take_events(value)
            elif waitable is seat.pending:
                answer = seat.take_answer(value)
                if seat.state is SeatState.CLOSING:
                    self._workers.gone(seat)
            elif waitable in seat.sends:
                seat.take_send(waitable, value)
        except RayError as error:
            if not self._workers.loading.gone(seat, error):
                self._lost(seat, error)
            return
        if events is None:
            self._workers.lose(seat, "its engine's event stream ended", alive=True)
        elif answer is not None:
            self._workers.answered(seat, answer)
        else:
            seat.inbox.extend(events)
            self._handle_inbox(seat)
            self._share_texts()

    def _share_texts(self) -> None:
        """Send workers what others have sampled of groups that they share."""
        for worker, texts in self._requests.sibling_texts():
            if self.drafters.hear(worker, texts):
                self._requests.texts_sent(worker, texts)

    def _lost(self, seat: Seat, error: RayError) -> None:
        alive = isinstance(error, RayTaskError)
        faultless = not alive and node_lost(error, seat.node_id)
        self._workers.lose(seat, reason_of(error), alive=alive, faultless=faultless)

    def _handle_inbox(self, seat: Seat) -> None:
        while seat.inbox:  # emptied by a loss; kept by an exception, for abort_all
            self._handle(seat, seat.inbox.popleft())

    def _handle(self, seat: Seat, event: WorkerEvent) -> None:
        match event:
            case Finished(rollout):
                seat.progress_s = self._context.clock()
                self._requests.finish(seat, rollout)
                self._look_ahead(self._seats.by_name.values() if self._ahead_apart else (seat,))
            case Progress(request_id, delta):
                seat.progress_s = self._context.clock()
                self._requests.progress(seat, request_id, delta)
            case Rejected(request_id, reason):
                self._requests.reject(seat, request_id, reason)
            case EngineWindow():
                if event.decode_tokens or event.prefill_tokens:
                    seat.progress_s = self._context.clock()
                self._requests.preempted(event.preempted)
                if event.early is not None and not event.evaluation:
                    self.early.used(event.early)
                ahead = self.early.sampled_in(seat.name, evaluation=event.evaluation)
                if ahead:
                    self.early.tally.spent_s += event.end_s - event.start_s
                seat.spans.window(event, "early" if ahead else "decode")
                self._context.loop.tell(WorkerNews(seat.name, event))
            case PassEvent():
                self._context.loop.tell(WorkerNews(seat.name, event))
            case EngineFailed(reason):
                self._workers.lose(seat, reason, alive=True)
            case Leaving(reason):
                self._workers.leave(seat, reason)
            case GraphsFailed(graph, reason):
                self._context.observer.event(
                    "graphs_failed",
                    f"{seat.name}: steps are launched kernel by kernel, several times slower for few requests: no CUDA"
                    f" graph of {graph}: {reason}",
                )
            case DrafterFailed(name, reason, final):
                until = "any more" if final else "until it gets new weights"
                self._context.observer.event("drafter_failed", f"{seat.name}: {name} is not used {until}: {reason}")
                self._context.loop.tell(WorkerNews(seat.name, event))
            case TrainedWeights(manifest):
                self.drafters.fetch(seat, manifest.version)
            case MicroStep() | TrainStopped() | Checkpointed() | TrainFailed() | RecordingReport():
                self._context.loop.tell(WorkerNews(seat.name, event))
            case _:
                assert_never(event)
