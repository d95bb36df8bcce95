"""The decision for any numbers, and over several rollouts: nobody comes in vain, and letting go costs no time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fleet import FleetNow, margin_s, wanted_workers

SECONDS = st.floats(0, 1e5)
TOKENS = st.floats(0, 1e12)


@st.composite
def moments(draw: st.DrawFn) -> FleetNow:
    workers = draw(st.integers(0, 300))
    waiting = draw(st.integers(0, 10**6))
    return FleetNow(
        workers=workers,
        idle_s=draw(st.lists(SECONDS, max_size=workers)),
        waiting=waiting,
        waiting_tokens=draw(TOKENS) if waiting else 0.0,
        next_tokens=draw(TOKENS),
        next_in_s=draw(SECONDS),
        between_s=draw(SECONDS),
        rollouts_left=draw(st.integers(0, 10**6)),
        tokens_per_s=draw(st.just(0.0) | st.floats(1e-3, 1e7)),
        start_s=draw(st.none() | SECONDS),
        training=draw(st.booleans()),
    )


SIZES = st.tuples(st.integers(1, 300), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(deadline=None)
@given(moments(), SIZES)
def test_never_below_the_least_nor_above_the_most_and_nobody_with_requests_goes(
    now: FleetNow, sizes: tuple[int, int]
) -> None:
    least, most = sizes
    kept = now.workers - len(now.idle_s)
    wanted = wanted_workers(now, least=least, most=most)
    assert max(least, kept) <= wanted <= max(most, kept)
    assert wanted_workers(now, least=most, most=most) == max(most, kept), "a fleet of a fixed size"


@settings(deadline=None)
@given(moments(), SIZES, TOKENS, SECONDS)
def test_more_that_waits_never_means_fewer_and_a_slower_start_never_more_for_it(
    now: FleetNow, sizes: tuple[int, int], tokens: float, seconds: float
) -> None:
    least, most = sizes
    now = replace(now, waiting=now.waiting + 1, next_tokens=0.0)
    wanted = wanted_workers(now, least=least, most=most)
    more = replace(now, waiting_tokens=now.waiting_tokens + tokens)
    assert wanted_workers(more, least=least, most=most) >= wanted
    if now.start_s is not None:
        slower = replace(now, start_s=now.start_s + seconds)
        assert wanted_workers(slower, least=least, most=most) <= wanted


@settings(deadline=None)
@given(moments(), SIZES)
def test_whoever_is_asked_for_finds_work_for_a_margin(now: FleetNow, sizes: tuple[int, int]) -> None:
    least, most = sizes
    now = replace(now, next_tokens=0.0, tokens_per_s=max(now.tokens_per_s, 1.0), start_s=now.start_s or 0.0)
    assert now.start_s is not None
    wanted = wanted_workers(now, least=least, most=most)
    if wanted > max(now.workers, least):
        left = now.waiting_tokens - now.workers * now.tokens_per_s * now.start_s
        assert left >= wanted * now.tokens_per_s * margin_s(now.start_s) * (1 - 1e-9)
        assert wanted - now.workers <= now.waiting


@settings(deadline=None)
@given(moments(), SIZES)
def test_nobody_goes_while_requests_wait_or_idle_workers_train(now: FleetNow, sizes: tuple[int, int]) -> None:
    least, most = sizes
    for busy in (replace(now, waiting=1), replace(now, training=True), replace(now, start_s=None)):
        assert wanted_workers(busy, least=least, most=most) >= min(now.workers, most)


@settings(deadline=None)
@given(
    start_s=st.floats(0, 500),
    gap_s=st.floats(0, 3000),
    rollout_s=st.floats(5, 3000),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    left=st.integers(1, 50),
)
def test_over_the_time_between_two_rollouts_letting_go_costs_nothing(
    start_s: float, gap_s: float, rollout_s: float, sizes: tuple[int, int], left: int
) -> None:
    """A fleet at its largest runs out of requests, and the next rollout begins `gap_s` later. What is decided at every
    margin's quarter changes its size at most twice: down, and up again at least `start_s` before."""
    least, most = sizes[0], sum(sizes)
    rate, step_s = 1000.0, margin_s(start_s) / 4
    workers, changes, idle_saved_s = most, [], 0.0
    for index in range(math.ceil(gap_s / step_s)):
        passed_s = index * step_s
        now = FleetNow(
            workers=workers,
            idle_s=[passed_s] * workers,
            next_tokens=4 * most * rate * max(rollout_s, start_s),
            next_in_s=gap_s - passed_s,
            between_s=gap_s,
            rollouts_left=left,
            tokens_per_s=rate,
            start_s=start_s,
        )
        wanted = wanted_workers(now, least=least, most=most)
        if wanted != workers:
            changes.append((wanted, gap_s - passed_s))
            workers = wanted
        idle_saved_s += (most - workers) * step_s
    assert [size for size, _ in changes] in ([], [least, most])
    if changes:
        assert changes[1][1] >= start_s, "whoever comes back is there in time"
        assert idle_saved_s > 0
    elif least < most:
        assert gap_s <= start_s + 2 * margin_s(start_s) + 2 + step_s, "it pays, and nobody went"


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (FleetNow(workers=1), 4),  # nothing is known yet
        (FleetNow(workers=1, tokens_per_s=100, start_s=4), 1),  # nothing waits
        (FleetNow(workers=1, waiting=50, waiting_tokens=300, tokens_per_s=100, start_s=4), 1),  # done before it is up
        (FleetNow(workers=1, waiting=50, waiting_tokens=1000, tokens_per_s=100, start_s=4), 3),
        (FleetNow(workers=1, waiting=1, waiting_tokens=1000, tokens_per_s=100, start_s=4), 2),  # for one request
        (FleetNow(workers=1, next_tokens=50, rollouts_left=100, tokens_per_s=100, start_s=4), 4),  # in all rollouts
        (FleetNow(workers=1, next_tokens=50, rollouts_left=1, tokens_per_s=100, start_s=4), 1),
        (FleetNow(workers=3, idle_s=[9, 9], tokens_per_s=100, start_s=4, next_in_s=9), 1),
        (FleetNow(workers=3, idle_s=[9, 0.5], tokens_per_s=100, start_s=4, next_in_s=9), 2),  # one has just ended
        (FleetNow(workers=3, idle_s=[9, 9], tokens_per_s=100, start_s=4, next_in_s=7), 3),  # too soon
    ],
)
def test_by_example(now: FleetNow, wanted: int) -> None:
    assert wanted_workers(now, least=1, most=4) == wanted
