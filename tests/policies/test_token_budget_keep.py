"""The probability with which late responses go on, by the price of a token."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.token_budget.allocation import allocate
from policies.token_budget.keep import LateModel, best_keep, price_of_equal

POSITIVE = st.floats(0.01, 10)


@given(POSITIVE, POSITIVE, st.floats(0.05, 0.95), POSITIVE, POSITIVE, st.floats(1e-3, 1))
def test_at_a_price_it_and_the_count_are_the_best_of_all(
    early: float, late: float, q: float, usual_tokens: float, excess: float, price: float
) -> None:
    """Variance plus price times cost, over a fine grid of both."""
    keeps, counts = np.geomspace(1e-3, 1, 400)[:, None], np.geomspace(1e-3, 1e4, 800)[None]
    total = (early + q * late / keeps) / counts + price * counts * (usual_tokens + q * keeps * excess)
    row, column = np.unravel_index(int(total.argmin()), total.shape)
    n = float(counts[0, column])
    found = best_keep(late, excess, price, n, least=1e-3)
    mine = (early + q * late / found) / n + price * n * (usual_tokens + q * found * excess)
    assert mine <= float(total[row, column]) * (1 + 1e-9)
    assert float(total[row, column]) <= mine * 1.01


@given(POSITIVE, POSITIVE, st.floats(0.05, 0.95), POSITIVE, POSITIVE)
def test_where_counts_are_free_it_has_the_least_variance_times_cost(
    early: float, late: float, q: float, usual_tokens: float, excess: float
) -> None:
    """Alternating with the count that the price gives, as from step to step, it comes to the minimum."""
    price, keep = 1e-6, 0.5
    for _ in range(300):
        n = np.sqrt((early + q * late / keep) / (price * (usual_tokens + q * keep * excess)))
        keep = float(np.sqrt(keep * best_keep(late, excess, price, float(n), least=1e-4)))  # damped
    grid = np.geomspace(1e-4, 1, 4000)
    product = (early + q * late / grid) * (usual_tokens + q * grid * excess)
    mine = (early + q * late / keep) * (usual_tokens + q * keep * excess)
    assert mine <= float(product.min()) * (1 + 1e-3)


def test_the_hopeless_are_given_up_and_what_carries_the_gradient_runs_on() -> None:
    assert best_keep(0.0, 50.0, 1e-4, 8, least=0.1) == 0.1
    assert best_keep(10.0, 50.0, 1e-4, 8, least=0.1) == 1.0
    assert best_keep(0.1, 0.0, 1e-4, 8, least=0.1) == 1.0  # nothing would be saved
    assert 0.1 < best_keep(0.1, 50.0, 1e-4, 32, least=0.1) < 1


def test_without_a_budget_the_price_is_about_that_of_a_budget_of_as_much() -> None:
    spread, tokens = np.full(16, 0.4), np.full(16, 50.0)
    _, price = allocate(spread, tokens, 16.0 * 16 * 50, least=2, most=64)
    assert price_of_equal(spread.tolist(), tokens.tolist(), 16) == pytest.approx(price, rel=0.08)


def test_late_responses_are_remembered_by_prompt_and_fall_back_to_the_pool() -> None:
    model = LateModel()
    assert model.square(1) is None
    model.observe(1, [])
    assert model.square(1) is None
    model.observe(1, [0.4, 0.0])  # one at 0.2 that went on at probability 1/2, one that was given up
    assert model.square(1) == pytest.approx(0.2)
    model.observe(2, [0.0, 0.0])
    hopeless, known, new = model.square(2), model.square(1), model.square(3)
    assert hopeless is not None
    assert known is not None
    assert new is not None
    assert hopeless < new < known
    other = LateModel()
    other.load_state_dict(json.loads(json.dumps(model.state_dict())))
    assert [other.square(i) for i in range(4)] == [model.square(i) for i in range(4)]
