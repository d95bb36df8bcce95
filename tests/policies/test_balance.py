"""Properties of the assignment rule, and its makespan beside the optimum."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.balance import Grant, WaitingGroup, WorkerLoad, balance

groups = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50).map(float)), max_size=8).map(
    lambda items: [WaitingGroup(i, count, tokens) for i, (count, tokens) in enumerate(items)]
)


@st.composite
def loads(draw: st.DrawFn) -> list[WorkerLoad]:
    workers = []
    for worker in range(draw(st.integers(1, 5))):
        prompts = draw(st.lists(st.integers(0, 9), max_size=4))
        free = draw(st.integers(0, 12))
        expected = sum(draw(st.integers(1, 30)) for _ in prompts)
        workers.append(WorkerLoad(worker, free, len(prompts), float(expected), set(prompts)))
    return workers


@given(groups, loads(), st.randoms())
def test_fills_every_slot_once_and_ignores_the_order_of_its_input(waiting, workers, rng) -> None:  # type: ignore[no-untyped-def]
    grants = balance(waiting, workers)
    assert sum(g.count for g in grants) == min(sum(w.free_slots for w in workers), sum(g.count for g in waiting))
    for w in workers:
        assert sum(g.count for g in grants if g.worker == w.worker) <= w.free_slots
    for group in waiting:
        assert sum(g.count for g in grants if g.prompt_id == group.prompt_id) <= group.count
    assert all(g.count > 0 for g in grants)
    rng.shuffle(waiting)
    rng.shuffle(workers)
    assert balance(waiting, workers) == grants


@given(groups, loads())
def test_no_worker_idles_while_enough_requests_wait(waiting: list[WaitingGroup], workers: list[WorkerLoad]) -> None:
    idle = [w for w in workers if w.running == 0 and w.free_slots > 0]
    busy_after = {g.worker for g in balance(waiting, workers)}
    assert sum(w.worker in busy_after for w in idle) == min(len(idle), sum(g.count for g in waiting))


@given(groups, st.integers(1, 4))
def test_groups_stay_whole_when_there_is_room_and_a_group_for_each(waiting: list[WaitingGroup], n: int) -> None:
    workers = [WorkerLoad(w, 1000, 0, 0.0, ()) for w in range(n)]
    grants = balance(waiting, workers)
    if len(waiting) >= n:
        assert sorted((g.prompt_id, g.count) for g in grants) == sorted((g.prompt_id, g.count) for g in waiting)


def test_longest_first_and_leftovers_stay_with_their_holder() -> None:
    waiting = [WaitingGroup(0, 3, 10.0), WaitingGroup(1, 3, 90.0), WaitingGroup(2, 3, 50.0)]
    assert balance(waiting, [WorkerLoad(0, 4, 0, 0.0, ())]) == [Grant(0, 1, 3), Grant(0, 2, 1)]
    # Prompt 1 runs on worker 0, which is full: worker 1 leaves its leftovers alone while anything else waits.
    workers = [WorkerLoad(0, 0, 4, 360.0, {1}), WorkerLoad(1, 2, 2, 20.0, {7})]
    assert balance([WaitingGroup(1, 2, 90.0), WaitingGroup(2, 3, 50.0)], workers) == [Grant(1, 2, 2)]
    assert balance([WaitingGroup(1, 2, 90.0)], workers) == [Grant(1, 1, 2)]


def test_one_group_is_split_over_idle_workers() -> None:
    workers = [WorkerLoad(w, 64, 0, 0.0, ()) for w in range(3)]
    assert [g.count for g in balance([WaitingGroup(5, 8, 1.0)], workers)] == [3, 3, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_load_is_within_grahams_bound_of_the_optimum(lengths: list[int], n: int) -> None:
    """Greedy longest-first: at most 4/3 - 1/(3n) of the best possible largest load, found by brute force."""
    waiting = [WaitingGroup(i, 1, float(x)) for i, x in enumerate(lengths)]
    load = [0.0] * n
    for grant in balance(waiting, [WorkerLoad(w, 100, 0, 0.0, ()) for w in range(n)]):
        load[grant.worker] += lengths[grant.prompt_id]
    best = min(
        max(sum(x for x, w in zip(lengths, where, strict=True) if w == worker) for worker in range(n))
        for where in itertools.product(range(n), repeat=len(lengths))
    )
    assert max(load) <= best * (4 / 3 - 1 / (3 * n)) + 1e-9


def test_equal_prompt_ids_are_an_error() -> None:
    with pytest.raises(ValueError, match="distinct prompt ids"):
        balance([WaitingGroup(1, 1, 1.0), WaitingGroup(1, 2, 1.0)], [])
