"""Idle workers look ahead: real requests, new weights and losses come first, and the text is the next run's own."""

import time

import pytest

from contracts.rollout import Rollout
from launch.dispatch.early import FIRST_ID
from tests.actors.fake_engine import FakeOptions, make_request, response
from tests.actors.test_dispatch_ray import check, options, running, weights

pytestmark = pytest.mark.ray
SLOW = FakeOptions(step_s=0.004)
NEXT = [make_request(100 + i, 9, max_new_tokens=40) for i in range(12)]


def texts_are_the_next_runs_own(dispatcher: object) -> int:
    """How many have text, which is what the oracle says."""
    begun = dispatcher.early.begin(NEXT)  # type: ignore[attr-defined]
    for request in begun:
        if request.early is not None:
            assert request.early.tolist() == response(request)[0][: len(request.early)]
    return sum(request.early is not None for request in begun)


def test_the_worker_without_work_looks_ahead_while_another_decodes_the_tail() -> None:
    with running(options(2), SLOW) as (dispatcher, events):
        done: list[Rollout] = []
        dispatcher.early.plan(NEXT)
        asked = [make_request(i, i, max_new_tokens=200) for i in range(6)]
        stats = dispatcher.run(asked, done.append)
        check(done, asked)
        assert (stats.duplicates, stats.failed, events) == (0, (), [])
        dispatcher.set_weights(*weights(1))
        again: list[Rollout] = []
        dispatcher.run(NEXT, again.append)
        check(again, NEXT)


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_that_share_cores_with_one_that_decodes_do_not_look_ahead(nodes: int) -> None:
    with running(options(2), SLOW) as (dispatcher, _):
        dispatcher._ahead_apart = True
        for place, seat in enumerate(dispatcher._seats.by_name.values()):
            seat.node_id = f"node-{place % nodes}"
        done: list[Rollout] = []
        dispatcher.early.plan(NEXT)
        asked = [make_request(i, i, max_new_tokens=200) for i in range(6)]
        dispatcher.run(asked, done.append)
        check(done, asked)
        assert (next(dispatcher.early._ids) > FIRST_ID) == (nodes == 2), "who was given some"


def test_where_nobody_shares_their_devices_workers_go_on_between_runs_until_new_weights() -> None:
    with running(options(2), SLOW) as (dispatcher, events):
        dispatcher.early.meanwhile = True
        dispatcher.early.plan(NEXT)
        asked = [make_request(i) for i in range(4)]
        dispatcher.run(asked, lambda rollout: None)
        deadline_s = time.monotonic() + 60
        while dispatcher.early.tally.sampled < 50 and time.monotonic() < deadline_s:
            dispatcher.settle()
            time.sleep(0.01)
        dispatcher.set_weights(*weights(1))
        assert texts_are_the_next_runs_own(dispatcher) > 0
        done: list[Rollout] = []
        dispatcher.run(NEXT, done.append)
        check(done, NEXT)
        assert events == []
