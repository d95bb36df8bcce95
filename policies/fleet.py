"""How many rollout workers pay off now: a pure decision from numbers, no clock, no state, no Ray.

Workers pay off in two ways, so there are two questions.

More for what waits now? A new one takes waiting requests, never running ones. With `d` seconds until it can (start-up),
the present `W` workers at `r` tokens/s each have taken `W r d` of the `Q` waiting tokens. It pays off if every worker
of the larger fleet still has work for a margin `m`: up to (Q - W r d) / (r m) workers do.

More for the next rollout, or fewer until then? A worker without requests is released if the next rollout is further
away than a start takes. It is requested again that long before, so that its release costs no time. Between the two
thresholds nothing changes (hysteresis). The start-up of a worker kept from rollout to rollout pays off over all
remaining rollouts of the run; that of one which will be released again only over the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

IDLE_S = 1.0  # a worker whose last request has just ended may get others
MARGIN_S = 1.0
MARGIN_SHARE = 0.25  # of the start-up, which varies


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNow:
    """The inputs of the decision, at one moment."""

    workers: int  # up, or starting
    idle_s: Sequence[float] = ()  # of each idle worker that is up: its idle time
    waiting: int = 0  # requests that no worker has, nor a slot for
    waiting_tokens: float = 0.0  # expected, of their responses
    next_tokens: float = 0.0  # expected, of the next rollout; 0: none, or unknown
    next_in_s: float = 0.0  # at least, until it begins
    between_s: float = 0.0  # usual time from idle workers to the next rollout
    rollouts_left: int = 1  # of the run, including the next
    tokens_per_s: float = 0.0  # of one worker at full load; 0: not measured yet
    start_s: float | None = None  # from the wish for a worker to its first request; None: not measured yet
    training: bool = False  # workers without requests train a drafter that is due


def margin_s(start_s: float) -> float:
    """Return the margin by which a benefit must exceed its cost."""
    return MARGIN_S + MARGIN_SHARE * start_s


def wanted_workers(now: FleetNow, *, least: int, most: int) -> int:
    """Return the wanted number of workers. Above `now.workers`, some are to be requested; below, workers without
    requests are to go. Between `least` and `most`, but workers with requests, or starting, are always kept."""
    kept = now.workers - len(now.idle_s)
    if now.tokens_per_s <= 0 or now.start_s is None:
        return max(most, kept)  # nothing is known yet: take all that fit
    margin = margin_s(now.start_s)
    wanted = max(now.workers, _for_waiting(now, now.start_s, margin), _for_next(now, now.start_s, margin))
    spare = not (now.waiting or now.training) and now.next_in_s > now.start_s + 2 * margin
    if spare and wanted == now.workers:
        wanted -= sum(idle_s >= IDLE_S for idle_s in now.idle_s)
    return max(min(wanted, most), least, kept)


def _for_waiting(now: FleetNow, start_s: float, margin: float) -> int:
    """Return the number of workers that have work for a margin in what waits now."""
    left = now.waiting_tokens - now.workers * now.tokens_per_s * start_s
    return min(_workers(left, now.tokens_per_s * margin), now.workers + now.waiting)


def _for_next(now: FleetNow, start_s: float, margin: float) -> int:
    """Return the number of workers whose start-up pays off in the coming rollouts; 0: too early to request them."""
    if now.next_in_s > start_s + margin:
        return 0
    stays = now.between_s <= start_s + 2 * margin
    work = now.next_tokens * (now.rollouts_left if stays else 1)
    late_s = max(start_s - now.next_in_s, 0.0)
    return _workers(work - now.workers * now.tokens_per_s * late_s, now.tokens_per_s * margin)


def _workers(tokens: float, of_each: float) -> int:
    return floor(min(max(tokens, 0.0), 1e9 * of_each) / of_each)
