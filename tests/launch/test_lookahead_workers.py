"""A dispatcher without Ray: which workers look ahead and are stopped again, and what that takes of the driver."""

from itertools import count
from typing import Any, cast

from benchmarks.alone import DispatcherAlone, nothing
from config.rollout import EngineOptions, RolloutOptions
from config.speculation import SpeculationOptions
from contracts.engine import Abort, Command, Submit
from contracts.rollout import Finished, FinishReason, Request, Rollout, Sampled
from launch.dispatch.early import is_early
from launch.dispatch.seat import Seat, SeatState
from launch.dispatch.spans import WorkerSpans
from tests.actors.fake_engine import make_request, response

NEXT = [make_request(100 + i, 9) for i in range(12)]


class Told(Seat):
    """A worker that does nothing with what it gets."""

    def give(self, command: Command) -> None:
        given.setdefault(self.name, []).append(command)


given: dict[str, list[Command]] = {}


def dispatcher_of(nodes: dict[str, str], clock: Any = None) -> DispatcherAlone:
    """Its workers, by name, are up on those nodes, and share their nodes' cores."""
    given.clear()
    plain = SpeculationOptions(mode="off")  # nobody is told of siblings: there are no Ray actors
    options = RolloutOptions(workers=len(nodes), engine=EngineOptions(max_running=2), speculation=plain)
    made = DispatcherAlone(nothing, options, **({} if clock is None else {"clock": clock}))
    made._ahead_apart = True
    for name, node in nodes.items():
        seat = Told(name=name, handle=cast(Any, None), spans=WorkerSpans(name, nothing), loop=made.loop)
        seat.node_id = node
        made._seats.by_name[name] = seat
        made._seats.enter(seat, SeatState.READY)
    return made


def finish(dispatcher: DispatcherAlone, worker: str, request: Request) -> None:
    """The worker says that it has ended."""
    tokens, _ = response(request)
    zeros = [0.0] * len(tokens)
    rollout = Rollout(
        request_id=request.request_id,
        sampled=Sampled(*(cast(Any, row) for row in (tokens, zeros, zeros))),
        finish_reason=FinishReason.STOP,
        weights_version=0,
        started_s=0.0,
        finished_s=0.0,
    )
    dispatcher._handle(dispatcher._seats.by_name[worker], Finished(rollout))


def decodes(dispatcher: DispatcherAlone, worker: str, asked: list[Request]) -> list[Request]:
    running = dispatcher._requests.running(worker)
    return [request for request in asked if request.request_id in running]


def looking(worker: str) -> bool:
    """Whether the last command that it got has it look ahead."""
    last = given[worker][-1]
    return isinstance(last, Submit) and all(is_early(request.request_id) for request in last.requests)


def test_all_workers_of_a_node_are_asked_once_its_last_one_is_idle_and_stopped_by_real_work_of_one() -> None:
    dispatcher = dispatcher_of({"a": "one", "b": "one", "c": "two"})
    dispatcher.early.plan(NEXT)
    asked = [make_request(i) for i in range(6)]
    dispatcher.begin(asked)
    assert [len(dispatcher._requests.running(name)) for name in "abc"] == [2, 2, 2]
    for request in decodes(dispatcher, "a", asked):
        finish(dispatcher, "a", request)
    assert not looking("a"), "b decodes on the same cores"
    for request in decodes(dispatcher, "b", asked):
        finish(dispatcher, "b", request)
    assert [looking(name) for name in "abc"] == [True, True, False]
    dispatcher.submit(make_request(50))
    dispatcher.look()
    (busy,) = [name for name in "ab" if dispatcher._requests.running(name)]
    sibling = "ab".replace(busy, "")
    assert [type(command) for command in given[busy]] == [Submit, Submit, Abort, Submit]
    assert [type(command) for command in given[sibling]] == [Submit, Submit, Abort], "it shares the cores"
    assert [dispatcher.early.holds(name) for name in "ab"] == [False, False]


def test_sending_and_stopping_early_samples_counts_as_the_drivers_time() -> None:
    """By a clock on which each look at it takes a second."""
    seconds = count()
    dispatcher = dispatcher_of({"a": "one"}, clock=lambda: float(next(seconds)))
    dispatcher.early.plan(NEXT)
    asked = [make_request(0)]
    dispatcher.begin(asked)
    finish(dispatcher, "a", asked[0])
    dispatcher.early.take()
    dispatcher.early.meanwhile = True
    dispatcher._look_ahead(dispatcher._seats.by_name.values())
    assert looking("a")
    assert dispatcher.early.tally.own_s == 1.0
    dispatcher._stop_early()
    assert dispatcher.early.take().own_s == 2.0
