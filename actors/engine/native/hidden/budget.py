"""Choice of the requests to record when not all fit the budget. Pure.

Each request has a fixed number in [0, 1), from its noise key, and is recorded while that is below a threshold. So the
choice is independent of length and order of arrival, and the same in every retry on every worker. The threshold follows
from the total demand of the RL step before; the first step is bounded by the requests' limits.
"""

_MASK64 = (1 << 64) - 1
MARGIN = 0.8  # planned share of the budget: one step's requests may be longer than another's


def request_draw(noise_key: int) -> float:
    """Return a uniform number in [0, 1), a function of the key alone (splitmix64's finalizer, S. Vigna, public
    domain)."""
    x = (noise_key + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class Share:
    """A budget of `max_rows` rows per RL step."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._demand = 0  # rows of this RL step's requests
        self._limits = 0  # upper bound of those rows
        self._expected: int | None = None  # demand of the RL step before; None: this is the first one
        self._spent = 0
        self.threshold = 1.0

    @property
    def room(self) -> int:
        """Rows that may still be delivered."""
        return self._max_rows - self._spent

    def foresee(self, limit_rows: int) -> None:
        """Account for a submitted request with at most this many rows."""
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
        """Start another RL step."""
        if self._demand:
            self._expected = self._demand
        self._demand = self._limits = self._spent = 0
        self.threshold = 1.0 if not self._expected else min(1.0, MARGIN * self._max_rows / self._expected)
