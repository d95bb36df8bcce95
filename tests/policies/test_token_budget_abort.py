"""Thresholds of early ends: quantiles of weighted lengths, the warm-up, and that they stay where lengths have them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.token_budget import AbortOptions
from policies.token_budget.abort import Thresholds, thresholds
from policies.token_budget.window import LengthWindow

ENTRIES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.5, 1.0, 4.0, 10.0])), min_size=1, max_size=40)


def window_of(entries: list[tuple[int, float]], size: int = 1024) -> LengthWindow:
    window = LengthWindow(size)
    for tokens, weight in entries:
        window.add(tokens, weight)
    return window


@given(ENTRIES, st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0]))
def test_a_quantile_is_that_of_as_many_responses_as_each_stands_for(entries: list[tuple[int, float]], q: float) -> None:
    repeated = [tokens for tokens, weight in entries for _ in range(round(2 * weight))]
    wanted = np.quantile(repeated, q, method="inverted_cdf")
    assert window_of(entries).quantile(q) == wanted
    assert window_of(entries[::-1]).quantile(q) == wanted
    assert window_of(entries).mean() == pytest.approx(np.mean(repeated))


@given(ENTRIES, st.integers(1, 10), st.integers(0, 30))
def test_a_window_is_of_its_newest_and_survives_a_checkpoint(
    entries: list[tuple[int, float]], size: int, limit: int
) -> None:
    window, again = window_of(entries, size), LengthWindow(size)
    again.load_state_dict(json.loads(json.dumps(window.state_dict())))
    newest = window_of(entries[-size:])
    for q in (0.0, 0.3, 0.8, 1.0):
        assert window.quantile(q) == again.quantile(q) == newest.quantile(q)
    late = [(tokens - limit, weight) for tokens, weight in entries[-size:] if tokens > limit]
    wanted = sum(more * weight for more, weight in late) / max(sum(weight for _, weight in late), 1e-9)
    assert window.mean_excess(limit) == pytest.approx(wanted)


def test_an_empty_window_knows_nothing() -> None:
    window = LengthWindow(4)
    assert (window.quantile(0.5), window.mean(), window.mean_excess(3)) == (None, None, 0.0)
    assert thresholds(AbortOptions(warmup_responses=1), window, 99, 100) is None


def test_nothing_before_the_warm_up_and_no_giving_up_beyond_the_limit() -> None:
    options = AbortOptions(warmup_responses=64, grace_tokens=5)
    window = window_of([(tokens, 1.0) for tokens in range(1, 101)])
    assert thresholds(options, window, 63, 1000) is None
    assert thresholds(options, window, 64, 1000) == Thresholds(20, 85)
    assert thresholds(options, window, 64, 86) == Thresholds(20, 85)
    assert thresholds(options, window, 64, 85) == Thresholds(20, None)  # it ends there anyway


KEEP = 0.1  # DUET's


def simulated(natural: np.ndarray, answers: np.ndarray, options: AbortOptions, *, weighted: bool) -> list[Thresholds]:
    """Steps of 128 responses, each of a natural length and answered at some token (0: never) under rules of the steps
    before it."""
    rng, window, found = np.random.default_rng(0), LengthWindow(options.window), list[Thresholds]()
    for step in range(80):
        at = thresholds(options, window, step * 128, 10**6)
        chosen = rng.integers(len(natural), size=128)
        for length, answer in zip(natural[chosen].tolist(), answers[chosen].tolist(), strict=True):
            give_up_at = at.give_up_at if at is not None else None
            late = give_up_at is not None and length > give_up_at and (not answer or answer > give_up_at)
            if late and rng.random() >= KEEP:
                continue
            if at is not None and answer:
                length = min(length, max(answer, at.poll_from) + options.grace_tokens)
            window.add(length, 1 / KEEP if late and weighted else 1.0)
        if at is not None:
            found.append(at)
    return found[40:]


LENGTHS = np.round(np.random.default_rng(1).lognormal(5, 0.6, 20_000)).astype(int)


def test_weights_keep_the_threshold_at_the_natural_quantile_and_without_them_it_ratchets_down() -> None:
    """Where the answer ends the response; the paper's options."""
    options, truth = AbortOptions(), int(np.quantile(LENGTHS, 0.8))
    kept = [at.give_up_at or 0 for at in simulated(LENGTHS, LENGTHS, options, weighted=True)]
    assert np.mean(kept) == pytest.approx(truth + options.grace_tokens, rel=0.05)
    unweighted = [at.give_up_at or 0 for at in simulated(LENGTHS, LENGTHS, options, weighted=False)]
    assert np.mean(unweighted) < 0.7 * truth


def test_polling_begins_no_later_than_the_natural_quantile_though_answers_cut_what_is_remembered() -> None:
    """Responses that would go on for long behind their answer: no response that is cut is shorter than polling
    allows, so that the low quantile climbs, by the grace at most each time, to where it naturally is."""
    options, answers = AbortOptions(grace_tokens=4), LENGTHS // 3
    found = simulated(LENGTHS, answers, options, weighted=True)
    assert max(at.poll_from for at in found) <= np.quantile(LENGTHS, options.poll_quantile) * 1.15
    late = np.array([at.give_up_at or 0 for at in found])
    assert (late >= np.quantile(answers, 0.8)).all()  # nobody is late who answers as soon as four of five do


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 400), min_size=3, max_size=60), st.integers(1, 300))
def test_what_a_late_token_holds_up_is_what_steps_of_a_batch_take(lengths: list[int], late: int) -> None:
    """Against a batch that is decoded token by token, a step of it as long with one response as with all."""
    window = window_of([(length, 1.0) for length in lengths])
    steps = {False: 0, True: 0}
    for position in range(max(lengths)):
        steps[position >= late] += 1
    tokens = {
        False: sum(min(length, late) for length in lengths),
        True: sum(max(length - late, 0) for length in lengths),
    }
    expected = steps[True] / tokens[True] / (steps[False] / tokens[False]) if steps[True] else 1.0
    assert window.held_up(late, 1 << 20) == pytest.approx(max(expected, 1.0))
    assert window.held_up(late, 2) <= window.held_up(late, 1 << 20) + 1e-9
