"""Whether new weights go to workers as deltas. Owns the rule that the default costs nothing where deltas do
not help.
"""

from typing import Literal

from actors.learner import PublishedDelta
from launch.dispatch import Deltas
from launch.observe import Observer

_SHARE = 0.25  # of the whole buffer, above which `auto` drops a delta, since it also costs encoding and applying
_IN_VAIN = 3  # updates in a row whose delta was larger; then `auto` stops looking


class DeltaChoice:
    """The choice of `cluster.weights_delta`."""

    def __init__(self, wanted: Literal["auto", "never", "always"], observer: Observer) -> None:
        self._wanted, self._observer = wanted, observer
        self._in_vain = 0

    @property
    def by_broadcast(self) -> bool:
        """Whether a broadcast sends only what changed. Rank 0 then keeps another copy of the weights on its device, so
        `auto` does not."""
        return self._wanted == "always"

    def share(self, *, elsewhere: bool) -> float:
        """Return the largest delta that the learner may make, as a share of the whole; 0: it need not look.
        `elsewhere`: a worker is on another node than the learner's rank 0. Workers on its node map the one buffer,
        which is faster."""
        match self._wanted:
            case "always":
                return 1.0
            case "auto" if elsewhere and self._in_vain < _IN_VAIN:
                return _SHARE
            case _:
                return 0.0

    def deltas(self, found: PublishedDelta | None, home: str) -> Deltas:
        """Return the workers' deltas from what the learner found; None: there was nothing to compare with."""
        if found is not None and self._wanted == "auto":
            self._in_vain = 0 if found.ref is not None else self._in_vain + 1
            if self._in_vain == _IN_VAIN:
                self._observer.event(
                    "weights_delta_given_up",
                    f"in {_IN_VAIN} updates in a row what changed was no smaller than {_SHARE:.0%} of the weights: "
                    "from now on all of them are sent (cluster.weights_delta)",
                )
        home = "" if self._wanted == "always" else home
        return Deltas(home) if found is None else Deltas(home, found.base_version, found.ref)
