"""Distribution of new weights to workers: from the object store, or piece by piece from the learner's devices.

Owns the weights that every worker must hold, who was offered them and each answer. `seats` owns the workers' states.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from actors.learner_group import WeightsSending
from contracts.handoff import Offer, Sent
from contracts.rollout import WeightsLoaded
from launch.dispatch.drafters import DrafterMessages
from launch.dispatch.events import WeightsGone
from launch.dispatch.seat import Seat, SeatState, Weights, some_are
from launch.dispatch.seats import Seats
from launch.errors import PacelineError


class HandOver:
    """One hand-over. `others`: seats that are loading older, now obsolete weights. `loaded`: answers of seats that hold
    the new ones, checked once it is known what was sent. `reasons`: by worker whose offer failed."""

    def __init__(self, seats: Collection[Seat]) -> None:
        self._offered = [seat for seat in seats if seat.state is SeatState.READY]
        self.others = [seat for seat in seats if seat.state is SeatState.LOADING]
        self._awaited = list(self._offered)
        self._sending: WeightsSending | None = None
        self._sent: Sent | None = None
        self.reasons: dict[str, str] = {}
        self.loaded: dict[Seat, WeightsLoaded] = {}

    def offers(self, sending: WeightsSending) -> Iterator[tuple[Seat, Offer]]:
        """Offer the weights to the seats that were up, except those lost or leaving since the learner began."""
        self._sending = sending
        for number, seat in enumerate(self._offered):
            if seat.state is SeatState.READY:
                yield seat, sending.offer(number)

    @property
    def receivers(self) -> int:
        return len(self._offered)

    @property
    def waiting(self) -> bool:
        """Whether the answer of a seat that is still up is missing."""
        return some_are(self._awaited, lambda seat: seat.state is SeatState.LOADING and seat.pending is not None)

    def answered(self, seat: Seat, loaded: WeightsLoaded) -> str:
        """Store the answer. Returns why the seat does not hold the weights, if so."""
        if loaded.failure:
            self.reasons[seat.name] = loaded.failure
        else:
            self.loaded[seat] = loaded
        return loaded.failure

    def finish(self) -> Weights:
        """Wait until the learner has sent everything. Returns the weights for all other seats."""
        assert self._sending is not None
        self._sent, manifest, ref = self._sending.finish()
        return Weights(manifest, ref)

    @property
    def sent(self) -> Sent:
        """What the learner has sent, once `finish` has returned."""
        assert self._sent is not None
        return self._sent

    @property
    def ways(self) -> Counter[str]:
        """Workers by way: ipc, broadcast, delta (of a broadcast), store."""
        ways = Counter(loaded.way for loaded in self.loaded.values())
        ways["store"] = len(self._offered) + len(self.others) - len(self.loaded)
        return ways


class Loading:
    """Loading of weights by one dispatcher's workers."""

    def __init__(self, seats: Seats, drafters: DrafterMessages) -> None:
        self._seats, self._drafters = seats, drafters
        self._limit_s = seats.options.weight_sync_timeout_s
        self._weights: Weights | None = None
        self._handing: HandOver | None = None  # the hand-over in progress
        # Earlier weights whose whole buffer these nodes have fetched; the reference keeps it there. Only one, since it
        # is one more buffer in the stores.
        self._base: Weights | None = None
        self._base_nodes: set[str] = set()
        self.by_delta = 0  # workers that made the present weights from a delta

    @property
    def version(self) -> int | None:
        """Version of the weights that every worker should hold; None: those its engine started with."""
        return self._weights.manifest.version if self._weights else None

    def set(self, weights: Weights) -> None:
        """All load these. Returns when every seat that is up holds them. Raises PacelineError as
        RolloutDispatcher.set_weights."""
        self._hold(weights)
        self.by_delta = 0
        for seat in self._seats.by_name.values():
            if seat.state in (SeatState.READY, SeatState.LOADING):
                self._load(seat, weights)
        self._until_loaded()

    def _hold(self, weights: Weights) -> None:
        self._weights = weights
        base, deltas = self._base, weights.deltas
        if base is not None and (deltas is None or not deltas.since(base.manifest.version)):
            self._base = None  # the chain does not reach back to it any more
        self._seats.requests.expect(weights.manifest.version)

    def renew(self, weights: Weights) -> None:
        """Take the same weights in another buffer, after the first was lost with its maker. Waiting workers load it."""
        if weights.manifest.version == self.version:
            self._weights = weights
            if self._handing is None:
                for seat in self._waiting():
                    self._load(seat, weights)

    def hand_over(self, send: Callable[[int], WeightsSending], *, to_trainers: bool) -> HandOver:
        """See RolloutDispatcher.hand_over."""
        handing = self._handing = HandOver(self._seats.by_name.values())
        try:
            for seat in handing.others:
                seat.forget_answer()
                self._seats.waits_for_weights(seat)  # they load from the store at the end
            for seat, offer in handing.offers(send(handing.receivers)):
                self._seats.enter(seat, SeatState.LOADING, self._limit_s)
                seat.receive(offer)
            self._seats.wait(lambda: not handing.waiting)
            weights = handing.finish()
            self._hold(weights)
        finally:
            self._handing = None
        for seat, loaded in handing.loaded.items():
            if seat.state is SeatState.LOADING:  # otherwise it leaves, or is lost
                self._check(seat, loaded, weights)
                self._seats.ready(seat)
                if to_trainers:
                    self._drafters.target_changed(seat, weights)
        for seat in self._waiting():
            self._load(seat, weights)
        self._until_loaded()
        return handing

    def begin(self, seat: Seat) -> bool:
        """Have a seat whose engine is up load the weights that it must hold. Returns false if there are none."""
        if self._handing is not None:
            self._seats.waits_for_weights(seat)  # from the store, once the hand-over has ended
        elif self._weights is not None:
            self._load(seat, self._weights)
        else:
            return False
        return True

    def answered(self, seat: Seat, loaded: WeightsLoaded) -> None:
        """Take a worker's answer to a hand-over. Raises PacelineError if it holds other weights."""
        if not loaded.failure and seat.down_since_wall_s is None:
            seat.spans.other("load_weights", seat.since_wall_s, self._seats.context.wall())
        if self._handing is None:
            assert self._weights is not None
            if loaded.instead:
                said = f"{seat.name}: {loaded.instead}; it took all of version {loaded.version}"
                self._seats.context.observer.event("weights_delta_refused", said)
            self.by_delta += loaded.way == "delta"
            if loaded.way == "store":
                self._fetched(seat, self._weights)
            self._check(seat, loaded, self._weights)
            self._seats.ready(seat)
            return
        if reason := self._handing.answered(seat, loaded):
            said = f"{seat.name}: {reason}; it loads them from the object store"
            self._seats.context.observer.event("weights_by_store", said)
        self._seats.waits_for_weights(seat)

    def gone(self, seat: Seat, error: RayError) -> bool:
        """Handle a seat whose weights could not be fetched because their maker is gone. It waits for the same weights
        in another buffer, or for newer ones. Returns false if the error has another cause."""
        cause = error.cause if isinstance(error, RayTaskError) else None
        if seat.state is not SeatState.LOADING or not isinstance(cause, ObjectLostError | RayActorError):
            return False
        self._seats.waits_for_weights(seat)
        self._seats.context.loop.tell(WeightsGone(seat, error))
        return True

    def look(self) -> None:
        """Ask again for another buffer if seats wait for it. Its maker may have postponed it while others sampled."""
        if self._handing is None and self._waiting():
            self._seats.context.loop.tell(WeightsGone())

    def _waiting(self) -> list[Seat]:
        return [seat for seat in self._seats.by_name.values() if seat.waits_for_weights]

    def forget(self, seat: Seat) -> None:
        """Forget a seat's answer, since its engine starts anew."""
        if self._handing is not None:
            self._handing.loaded.pop(seat, None)

    def _load(self, seat: Seat, weights: Weights) -> None:
        self._seats.enter(seat, SeatState.LOADING, self._limit_s)
        seat.load(weights, self._base if seat.node_id in self._base_nodes else None)

    def _fetched(self, seat: Seat, weights: Weights) -> None:
        """Note that a node has the whole buffer. The oldest to which the chain reaches back is kept."""
        if weights.deltas is None or seat.node_id == weights.deltas.home:
            return
        if self._base is None:
            self._base, self._base_nodes = weights, set()
        if self._base.ref is weights.ref:
            self._base_nodes.add(seat.node_id)

    def _until_loaded(self) -> None:
        seats = self._seats.by_name
        loading: list[Seat] = []

        def loaded() -> bool:
            if some_are(loading, lambda seat: seat.state is SeatState.LOADING):
                return False
            loading.extend(seat for seat in seats.values() if seat.state is SeatState.LOADING)
            return not loading and any(seat.state is SeatState.READY for seat in seats.values())

        self._seats.wait(loaded)

    def _check(self, seat: Seat, loaded: WeightsLoaded, weights: Weights) -> None:
        wanted = weights.manifest
        if (loaded.version, loaded.checksum) != (wanted.version, wanted.checksum):
            raise PacelineError(
                f"{seat.name} holds weights version {loaded.version} with checksum {loaded.checksum:#x}, "
                f"sent were version {wanted.version} with checksum {wanted.checksum:#x}",
                remedy="a worker that cannot hold the weights it was sent must not sample: see its log",
            )
