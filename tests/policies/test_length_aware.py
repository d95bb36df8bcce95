"""Budgets by length: long requests draft more, nobody drafts at a loss, and where lengths say nothing all are alike."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from config.strategy import Strategy
from policies.speculation import length_aware
from policies.speculation.length_aware import LengthAwareBudget, cheapest_depths, waiting_shares
from policies.steps import Load

CHAIN, TREE = Strategy.parse("suffix:8"), Strategy.parse("suffix:4x2/12")


class Linear:
    """Passes that cost `base_s` and `row_s` per row."""

    def __init__(self, base_s: float, row_s: float) -> None:
        self.base_s, self.row_s, self.asked = base_s, row_s, 0

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float | None:
        self.asked += 1
        return self.base_s + self.row_s * rows if self.base_s else None


class Constant:
    """Every drafter has something to say, and each of its tokens stands with the same probability."""

    def __init__(self, stands: float) -> None:
        self.stands = stands

    def survival(
        self, strategy: Strategy, prompt_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        lives = self.stands ** np.arange(1, strategy.depth + 1)
        return np.ones((len(prompt_ids), strategy.depth)), np.tile(lives, (len(prompt_ids), 1))


def made(costs: Any, acceptance: Any, slots: int) -> LengthAwareBudget:
    return LengthAwareBudget(costs, acceptance, slots)


def budget_of(base_s: float = 10e-3, row_s: float = 60e-6, stands: float = 0.6, slots: int = 64) -> LengthAwareBudget:
    """Knows 16 problems, prompt p of length 100 for p < 8 and of 2,000 for the others."""
    budget = made(Linear(base_s, row_s), Constant(stands), slots)
    rng = np.random.default_rng(0)
    for _ in range(8):
        for problem in range(16):
            for slot in range(4):
                budget.begin(slot, prompt(problem), 0, 8192)
            for slot in range(4):
                tokens = int((100 if problem < 8 else 2000) * np.exp(0.2 * rng.standard_normal()))
                budget.end(slot, tokens, finished=True, ended=True)
        budget.new_target()
    return budget


def prompt(problem: int) -> NDArray[np.int32]:
    return np.array([1, problem], np.int32)


def ask(
    budget: LengthAwareBudget,
    problems: list[int],
    *,
    drawn: int = 0,
    waiting: int = 0,
    room: int = 8191,
    strategy: Strategy = CHAIN,
) -> list[int]:
    requests = len(problems)
    for slot, problem in enumerate(problems):
        budget.begin(slot, prompt(problem), 0, 8192)
    load = Load(requests, waiting, 100 * requests, np.array(problems))
    slots, had = np.arange(requests), np.full(requests, drawn)
    given = budget.budgets(load, slots, had, np.full(requests, room), strategy)
    return [int(tokens) for tokens in given]


def test_long_requests_draft_more_than_short_ones() -> None:
    found = ask(budget_of(), [0] * 28 + [8] * 4)
    assert max(found[:28]) <= 1
    assert min(found[28:]) >= 4


def test_while_requests_wait_all_draft_alike() -> None:
    assert len(set(ask(budget_of(), [0] * 28 + [8] * 4, waiting=1))) == 1


def test_what_a_request_has_already_counts_more_than_what_its_problem_was() -> None:
    """All "short" ones have become as long as the long ones: they are as likely to go on."""
    budget = budget_of()
    problems = [0] * 28 + [8] * 4
    begins, later = ask(budget, problems), ask(budget, problems, drawn=2200)
    assert sum(begins[:28]) < sum(later[:28])


def test_nobody_drafts_what_costs_more_than_it_saves() -> None:
    assert set(ask(budget_of(stands=0.01), [8] * 32)) == {0}
    assert set(ask(budget_of(row_s=10e-3), [8] * 32)) == {0}
    assert set(ask(budget_of(row_s=1e-9), [8] * 32)) == {8}


@pytest.mark.parametrize("case", ["nothing known of lengths", "nothing known of costs", "few requests", "a tree"])
def test_where_nothing_is_known_or_can_be_gained_the_strategy_alone_decides(case: str) -> None:
    budget, problems, strategy = budget_of(), [0] * 28 + [8] * 4, CHAIN
    match case:
        case "nothing known of lengths":
            budget = made(Linear(10e-3, 60e-6), Constant(0.6), 64)
        case "nothing known of costs":
            budget = budget_of(base_s=0.0)
        case "few requests":
            problems = [0, 8]
        case "a tree":
            strategy = TREE
    assert set(ask(budget, problems, strategy=strategy)) == {8191}


def test_no_budget_exceeds_the_room() -> None:
    assert max(ask(budget_of(), [8] * 16, room=2)) <= 2


def test_a_division_stands_for_some_steps_of_the_same_requests() -> None:
    budget = budget_of()
    costs = budget._costs
    assert isinstance(costs, Linear)
    ask(budget, [0] * 28 + [8] * 4)
    load = Load(32, 0, 3200, np.array([0] * 28 + [8] * 4))
    slots, room = np.arange(32), np.full(32, 8000)
    asked = [costs.asked]
    for step in range(3 * length_aware.EVERY_STEPS):
        budget.budgets(load, slots, np.full(32, step), room, CHAIN)
        asked.append(costs.asked)
    assert len(set(asked)) <= 5
    budget.budgets(load, slots, np.full(32, 9), room, Strategy.parse("suffix:4"))
    assert costs.asked > asked[-1], "another strategy is another division"


def test_where_steps_are_too_short_for_it_nothing_is_divided() -> None:
    """A division would cost more than it may, or be out of date."""
    budget = budget_of(base_s=300e-6, row_s=5e-6)
    costs = budget._costs
    assert isinstance(costs, Linear)
    assert set(ask(budget, [0] * 24 + [8] * 8)) == {8191}
    asked, prompts = costs.asked, np.array([0] * 24 + [8] * 8)
    for _ in range(100):
        budget.budgets(Load(32, 0, 3200, prompts), np.arange(32), np.zeros(32, np.int64), np.full(32, 8191), CHAIN)
    assert costs.asked == asked


def test_where_steps_are_short_a_division_stands_longer_also_when_requests_come_and_go() -> None:
    budget = budget_of(base_s=2e-3, row_s=20e-6)
    costs = budget._costs
    assert isinstance(costs, Linear)
    given = ask(budget, [0] * 24 + [8] * 8)
    asked, slots = costs.asked, np.arange(32)
    for step in range(20):
        load = Load(32, 0, 3200, np.array([0] * 24 + [8] * 8))  # another array: other requests
        again = budget.budgets(load, slots, np.full(32, step), np.full(32, 8191), CHAIN)
        assert again.tolist() == given
    assert costs.asked == asked
    budget.begin(3, prompt(8), 0, 8192)
    load = Load(32, 0, 3200, np.array([0] * 24 + [8] * 8))
    fresh = budget.budgets(load, slots, np.zeros(32, np.int64), np.full(32, 8191), CHAIN)
    assert fresh[3] == 8191, "a new request drafts as its strategy says until the next division"


def test_evaluations_and_requests_that_leave_say_nothing_about_a_problem() -> None:
    budget = budget_of()
    before = len(budget._statistics)
    budget.end(5, 300, finished=True, ended=True)  # never began: an evaluation's
    budget.new_target()
    assert len(budget._statistics) == before
    budget.remember([prompt(77)], [np.zeros(40, np.int32)])
    budget.new_target()
    assert len(budget._statistics) == before + 1


@given(st.lists(st.lists(st.floats(1, 1e5), min_size=5, max_size=5), min_size=1, max_size=6))
def test_shares_add_up_to_one_and_follow_the_lengths(left: list[list[float]]) -> None:
    shares = waiting_shares(np.array(left))
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    one = waiting_shares(np.array(left[:1]))
    order = np.argsort(left[0], kind="stable")
    assert (np.diff(one[order]) >= -1e-12).all()


@given(
    prices=st.lists(st.floats(0, 1e-2), min_size=3, max_size=3),
    stands=st.floats(0.01, 0.99),
    row_s=st.floats(1e-7, 1e-3),
)
def test_the_depth_is_the_cheapest_and_grows_with_the_price(prices: list[float], stands: float, row_s: float) -> None:
    drafted = np.tile(np.arange(9.0), (3, 1))
    tokens = np.tile(np.concatenate([[1], 1 + (stands ** np.arange(1, 9)).cumsum()]), (3, 1))
    depths = cheapest_depths(np.array(prices), row_s, drafted, tokens)
    for price, depth in zip(prices, depths.tolist(), strict=True):
        costs = (price + row_s * (1 + drafted[0])) / tokens[0]
        assert costs[depth] <= costs.min() * (1 + length_aware.SLACK) * (1 + 1e-9)
    assert (np.diff(depths[np.argsort(prices)]) >= 0).all()


def test_it_pickles_before_its_first_call() -> None:
    budget = pickle.loads(pickle.dumps(made(Linear(1e-2, 1e-5), Constant(0.5), 8)))
    assert set(ask(budget, [0] * 8)) == {8191}
