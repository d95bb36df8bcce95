"""Whether new weights go to workers as deltas, and from which version on they still can. Owns the rule that the default
costs nothing where deltas do not help.
"""

from statistics import median
from typing import Literal

from actors.learner import PublishedDelta
from launch.dispatch import Delta, Deltas
from launch.observe import Observer
from models.manifest import WeightsManifest

_SHARE = 0.25  # of the whole buffer, above which `auto` drops a delta, since it also costs encoding and applying
_IN_VAIN = 3  # updates in a row whose delta was larger; then `auto` stops looking
_TRIES = 3  # hand-overs of each kind, in turn, whose pauses `auto` compares
_LONGER = 1.02  # times the median pause with whole weights, above which `auto` stops
_CHAIN_DELTAS = 16  # that a late joiner may need, so that it does not take longer than a whole copy
_CHAIN_SHARE = 0.5  # of the whole buffer: bytes of all deltas that are kept


class DeltaChoice:
    """The choice of `cluster.weights_delta`, and the chain of deltas up to the present weights."""

    def __init__(self, wanted: Literal["auto", "never", "always"], observer: Observer) -> None:
        self._wanted, self._observer = wanted, observer
        self._in_vain = 0
        self._used = False  # in the present hand-over: workers keep what they load
        self._stopped = self._decided = wanted != "auto"
        self._pauses_s: dict[bool, list[float]] = {False: [], True: []}  # by whether deltas were sent
        self._first = True
        self._chain: tuple[Delta, ...] = ()

    @property
    def by_pieces(self) -> bool:
        """Whether a hand-over by pieces sends only what changed. The ranks that send then keep another copy of the
        weights on their devices, so `auto` does not."""
        return self._wanted == "always"

    def share(self, *, elsewhere: bool) -> float:
        """Begin a hand-over. Return the largest delta that the learner may make, as a share of the whole; 0: it need
        not look. `elsewhere`: a worker is on another node than the learner's rank 0. Workers on its node map the one
        buffer, which is faster."""
        self._used = self._wanted == "always" or (elsewhere and not self._stopped)
        if not self._used:
            return 0.0
        if self._wanted == "always":
            return 1.0
        whole, delta = (len(self._pauses_s[kind]) for kind in (False, True))
        return 0.0 if not self._decided and whole < delta else _SHARE

    def deltas(self, manifest: WeightsManifest, found: PublishedDelta | None, home: str) -> Deltas | None:
        """Return what `share` leads to, from what the learner found; None: workers map or load the whole buffer, and
        keep nothing."""
        if found is not None and self._wanted == "auto":
            self._in_vain = 0 if found.ref is not None else self._in_vain + 1
            if self._in_vain == _IN_VAIN:
                self._stop(f"what changed was no smaller than {_SHARE:.0%} of the weights, {_IN_VAIN} updates in a row")
        if found is None or found.ref is None:
            self._chain = ()
        else:
            before = self._chain if self._chain and self._chain[-1].version == found.base_version else ()
            self._chain = (*before, Delta(found.base_version, manifest.version, found.ref, found.total_bytes))
        most_bytes = _CHAIN_SHARE * manifest.total_bytes
        while len(self._chain) > 1 and (
            len(self._chain) > _CHAIN_DELTAS or sum(delta.total_bytes for delta in self._chain) > most_bytes
        ):
            self._chain = self._chain[1:]
        return Deltas("" if self._wanted == "always" else home, self._chain) if self._used else None

    def took(self, pause_s: float, *, by_delta: bool) -> None:
        """Take the pause of a hand-over, from the learner's first work on the new weights until all workers hold them.
        `by_delta`: a worker took a delta. `auto` compares the first of both kinds, and stops if deltas take longer."""
        if self._first:  # workers also warm up, and none has anything to compare with
            self._first = False
            return
        if self._decided or not self._used:
            return
        self._pauses_s[by_delta].append(pause_s)
        if min(map(len, self._pauses_s.values())) < _TRIES:
            return
        self._decided = True
        whole_s, delta_s = (median(self._pauses_s[kind]) for kind in (False, True))
        said = f"new weights take {delta_s:.3g} s as deltas, {whole_s:.3g} s whole, medians of {_TRIES} updates each"
        if delta_s > _LONGER * whole_s:
            self._stop(said)
        else:
            self._observer.event("weights_delta_kept", f"{said}: deltas go on (cluster.weights_delta)")

    def _stop(self, why: str) -> None:
        self._stopped = self._decided = True
        self._observer.event(
            "weights_delta_given_up", f"{why}: from now on all of them are sent (cluster.weights_delta)"
        )
