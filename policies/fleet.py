"""How many rollout workers are worth having now: a pure decision from numbers, no clock, no state, no Ray.

Workers pay in two ways, so there are two questions.

More for what waits now? One that comes takes requests that nobody runs, never those that run. With `d` seconds until it
can (start-up), the present `W` workers at `r` tokens/s each have taken `W r d` of the `Q` tokens that wait. It pays if
every worker of the larger fleet still finds work for a margin `m`: up to (Q - W r d) / (r m) workers do.

More for the next rollout, or fewer until then? A worker without requests is let go where the next rollout is further
away than starting one again takes, and one is asked for again that long before, so that letting it go costs no time.
Between the two thresholds nothing changes (hysteresis). A worker that is kept from rollout to rollout earns its
start-up in all that are left of the run, one that will be let go again in the next one only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

IDLE_S = 1.0  # a worker whose last request has just ended may get others
MARGIN_S = 1.0
MARGIN_SHARE = 0.25  # of the start-up, which varies


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNow:
    """All that counts, at one moment."""

    workers: int  # up, or starting
    idle_s: Sequence[float] = ()  # of each that is up and has no request: for how long
    waiting: int = 0  # requests that nobody has, and nobody has a slot for
    waiting_tokens: float = 0.0  # expected, of their responses
    next_tokens: float = 0.0  # expected, of the next rollout; 0: there is none, or nothing is known
    next_in_s: float = 0.0  # until it begins, at least
    between_s: float = 0.0  # usually, from when workers run out of requests until the next rollout begins
    rollouts_left: int = 1  # of the run, with the next one
    tokens_per_s: float = 0.0  # of one worker with all the requests it can run; 0: not measured yet
    start_s: float | None = None  # from the wish for a worker to its first request; None: not measured yet
    training: bool = False  # workers without requests train a drafter that is due


def margin_s(start_s: float) -> float:
    """By how much an advantage must be larger than what it costs."""
    return MARGIN_S + MARGIN_SHARE * start_s


def wanted_workers(now: FleetNow, *, least: int, most: int) -> int:
    """As many as the run should have. More than `now.workers`: some are to be asked for; fewer: so many of those
    without requests are to go. From `least` to `most`, but one that has requests, or starts, is always kept."""
    kept = now.workers - len(now.idle_s)
    if now.tokens_per_s <= 0 or now.start_s is None:
        return max(most, kept)  # nothing is known yet: whoever has room may come
    margin = margin_s(now.start_s)
    wanted = max(now.workers, _for_waiting(now, now.start_s, margin), _for_next(now, now.start_s, margin))
    spare = not (now.waiting or now.training) and now.next_in_s > now.start_s + 2 * margin
    if spare and wanted == now.workers:
        wanted -= sum(idle_s >= IDLE_S for idle_s in now.idle_s)
    return max(min(wanted, most), least, kept)


def _for_waiting(now: FleetNow, start_s: float, margin: float) -> int:
    """As many workers as have work for a margin with what waits now."""
    left = now.waiting_tokens - now.workers * now.tokens_per_s * start_s
    return min(_workers(left, now.tokens_per_s * margin), now.workers + now.waiting)


def _for_next(now: FleetNow, start_s: float, margin: float) -> int:
    """As many as earn their start-up in the rollouts to come; 0: it is too early to ask for them."""
    if now.next_in_s > start_s + margin:
        return 0
    stays = now.between_s <= start_s + 2 * margin
    work = now.next_tokens * (now.rollouts_left if stays else 1)
    late_s = max(start_s - now.next_in_s, 0.0)
    return _workers(work - now.workers * now.tokens_per_s * late_s, now.tokens_per_s * margin)


def _workers(tokens: float, of_each: float) -> int:
    return floor(min(max(tokens, 0.0), 1e9 * of_each) / of_each)
