"""The optimum of DAS 4.2.2 is one; budgets by price reach it pass by pass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tools.draft_optimum import Batch, best_passes, by_brute_force, cost, prices, random_batch, survival
from policies.speculation.length_aware import cheapest_depths


@pytest.mark.parametrize("exchange", [0, 1])
def test_the_optimum_is_that_of_brute_force_on_a_thousand_batches(exchange: int) -> None:
    rng, at_kink, at_top = np.random.default_rng(4), 0, 0
    for _ in range(1000):
        batch, ratio = random_batch(rng)
        passes = best_passes(batch, ratio, exchange)
        found = cost(batch, batch.drafted(passes), ratio, exchange)
        assert found <= by_brute_force(batch, ratio, exchange, points=31) * (1 + 1e-6)
        at_kink += passes in batch.lengths
        at_top += passes == batch.lengths.max()
    assert at_kink - at_top > 20, "lengths at which the condition jumps are among them"
    assert at_top > 20, "and batches for which nothing should be drafted"


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30), exchange=st.sampled_from([0, 1]))
def test_no_other_division_is_cheaper(seed: int, exchange: int) -> None:
    rng = np.random.default_rng(seed)
    batch, ratio = random_batch(rng)
    best = batch.drafted(best_passes(batch, ratio, exchange))
    least = cost(batch, best, ratio, exchange)
    for size in (0.01, 0.1, 0.5):
        for _ in range(10):
            other = np.maximum(best * np.exp(size * rng.standard_normal(len(best))), 0)
            other += (rng.random(len(best)) < 0.1) * rng.uniform(0, size, len(best)) * batch.lengths
            assert cost(batch, other, ratio, exchange) >= least * (1 - 1e-9)


def test_where_drafting_is_all_there_is_the_batch_ends_at_the_drafters_limit() -> None:
    batch = Batch(np.array([100.0, 400.0]), np.array([0.9, 0.9]), np.array([0.5, 0.5]))
    assert best_passes(batch, 1e9) == pytest.approx(200, rel=1e-3)
    assert best_passes(batch, 1e-9) == 400


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 30))
def test_requests_that_each_draft_until_their_tokens_are_cheapest_reach_the_optimum(seed: int) -> None:
    """With the prices of the optimum, which add up to the base of a pass."""
    batch, ratio = random_batch(np.random.default_rng(seed))
    passes = best_passes(batch, ratio)
    price = prices(batch, passes)
    rest = ratio - price.sum()
    if passes in batch.lengths:  # of the requests of that length nobody drafts, and they have the rest
        assert rest > -1e-6 * ratio
    else:
        assert rest == pytest.approx(0, abs=1e-3 * ratio)
    most = float((batch.drafted(passes) / batch.lengths).max()) * 1.2 + 1
    efforts = np.concatenate([[0], np.geomspace(1e-4, most, 4000)])
    drafted, tokens = survival(batch, efforts)
    depths = cheapest_depths(price, 1.0, drafted, tokens, slack=0.0)
    chosen = efforts[depths] * batch.lengths
    assert cost(batch, chosen, ratio) <= cost(batch, batch.drafted(passes), ratio) * 1.005
