"""Which requests are recorded when not all of them fit the budget. Owns the threshold; pure.

A request has a fixed number in [0, 1), from its noise key: it is recorded while that is below the threshold. So the
choice depends neither on length nor on order of arrival, and is the same in every retry on every worker. The threshold
comes from what the RL step before would have taken as a whole; the first step is bounded by the requests' limits.
"""

_MASK64 = (1 << 64) - 1
MARGIN = 0.8  # of the budget is planned for: one step's requests are longer than the other's


def request_draw(noise_key: int) -> float:
    """Uniform in [0, 1), a function of the key alone (splitmix64's finalizer, S. Vigna, public domain)."""
    x = (noise_key + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class Share:
    """A budget of `max_rows` rows per RL step."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._demand = 0  # rows that this RL step's requests had
        self._limits = 0  # rows that they can have at most
        self._expected: int | None = None  # rows of this RL step, from the one before; None: the first one
        self._spent = 0
        self.threshold = 1.0

    @property
    def room(self) -> int:
        """Rows that may still be delivered."""
        return self._max_rows - self._spent

    def foresee(self, limit_rows: int) -> None:
        """A request that may have so many rows was submitted."""
        if self._expected is None:
            self._limits += limit_rows
            self.lower(self._max_rows / self._limits)

    def ended(self, rows: int) -> None:
        self._demand += rows

    def spend(self, rows: int) -> None:
        self._spent += rows

    def lower(self, threshold: float) -> None:
        self.threshold = min(self.threshold, threshold)

    def renew(self) -> None:
        """Another RL step begins."""
        if self._demand:
            self._expected = self._demand
        self._demand = self._limits = self._spent = 0
        self.threshold = 1.0 if not self._expected else min(1.0, MARGIN * self._max_rows / self._expected)
