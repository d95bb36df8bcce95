"""What drafters are booked: rests that grow, losses that are earned back, bursts that are pardoned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.ledger import EVER, LONGER, PARDON, REST, WORST, DrafterLedger

STEP_S = 0.01


def ledger(granted_s: float = 0.1, *, before_s: float = 1e4) -> DrafterLedger:
    """`before_s`: what its engine has decoded already, so that all losses are small beside it."""
    book = DrafterLedger(("a", "b"), exploration=0.0)
    book.decoded(1, before_s, ())
    book.grant(granted_s)
    return book


def rest(book: DrafterLedger, drafter: str = "a") -> float:
    """Seconds of others' decoding until it is back."""
    seconds = 0.0
    while book.rests(drafter):
        book.decoded(1, STEP_S, ("b",))
        seconds += STEP_S
    return seconds


def test_a_drafter_may_lose_its_allowance_and_then_rests_ever_longer() -> None:
    book, times = ledger(), REST
    for _ in range(4):
        book.saved("a", -0.1, 0.0)
        assert not book.rests("a")
        book.saved("a", -0.1, 0.0)
        assert book.rests("a")
        assert not book.rests("b")
        assert rest(book) == pytest.approx(times * 0.2, abs=2 * STEP_S)
        times *= LONGER


def test_one_that_earned_back_what_it_lost_rests_as_at_first() -> None:
    book = ledger()
    book.saved("a", -0.2, 0.0)
    first = rest(book)
    book.saved("a", 0.2, 0.0)
    book.saved("a", -0.3, 0.0)
    assert book.rests("a")
    assert rest(book) == pytest.approx(first, abs=2 * STEP_S), "of its gains no more than it may lose is kept"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-0.5, 0.2), st.floats(0.0, 5.0)), max_size=60))
def test_at_no_time_drafters_have_lost_more_than_a_small_part_of_all_decoding(
    steps: list[tuple[str, float, float]],
) -> None:
    """If none loses more in a step than it may: from the first second on, whatever others earned."""
    book, decoded_s, net_s = ledger(before_s=0.0), 0.0, {"a": 0.0, "b": 0.0}
    for drafter, seconds, plain_s in steps:
        book.decoded(1, plain_s, ())
        decoded_s += plain_s
        seconds = max(seconds, -book.spare_s(drafter))
        book.gained(drafter, seconds)
        net_s[drafter] += seconds
        assert sum(max(-one, 0.0) for one in net_s.values()) <= EVER * decoded_s + 1e-9
        assert book.spare_s("a") >= 0


def test_one_that_earned_much_before_is_not_put_out_for_long() -> None:
    book = ledger(before_s=1.0)
    book.saved("a", 2.0, 0.0)
    book.saved("a", -0.3, 0.0)
    assert rest(book) == pytest.approx(REST * 0.2, abs=2 * STEP_S), "less what its gains were kept for"


def test_what_a_drafter_earned_it_may_lose_and_no_other() -> None:
    book = ledger(before_s=10.0)
    book.gained("a", 2.0)
    assert book.spare_s("a") == pytest.approx(2.0 + 10 * EVER)
    assert book.spare_s("b") == pytest.approx(10 * EVER)
    book.gained("b", -0.1)
    assert book.spare_s("b") == pytest.approx(10 * EVER - 0.1)
    book.gained("b", -0.1)
    assert book.spare_s("b") == 0.0
    assert book.spare_s("a") == pytest.approx(2.0)
    book.decoded(4096, 0.0, ())
    assert book.net_s("a") == pytest.approx(1.0), "gains fade, losses do not"
    assert book.net_s("b") == pytest.approx(-0.2)


def test_what_making_it_ready_takes_is_an_investment() -> None:
    book = ledger()
    book.saved("a", -0.5, 0.45)
    assert not book.rests("a")
    book.saved("a", -0.5, 0.0)
    assert book.rests("a")


def test_the_allowance_grows_with_what_was_decoded_since_it_came_back() -> None:
    book = DrafterLedger(("a",), exploration=0.01)
    book.grant(0.1)
    book.decoded(1, 30.0, ())
    book.saved("a", -0.35, 0.0)
    assert not book.rests("a")
    book.saved("a", -0.1, 0.0)
    assert book.rests("a")
    rest(book)
    book.saved("a", -0.35, 0.0)
    assert book.rests("a"), "back with what it was granted first"


def test_late_steps_of_one_burst_are_pardoned_and_frequent_ones_count() -> None:
    book = ledger()
    assert [book.took("a", 1.0, STEP_S) for _ in range(5)] == [WORST * STEP_S] * 5
    assert book.took("b", 1.0, STEP_S) == WORST * STEP_S, "each drafter its own"
    for _ in range(7):
        assert book.took("a", STEP_S, STEP_S) == STEP_S
    assert book.took("a", 1.0, STEP_S) == 1.0, "another one soon after"
    for _ in range(PARDON):
        book.took("a", STEP_S, STEP_S)
    assert book.took("a", 1.0, STEP_S) == WORST * STEP_S


def test_lateness_is_what_steps_took_over_what_was_predicted_and_is_forgotten_by_a_rest() -> None:
    book = ledger(granted_s=1e-9)
    for _ in range(10):
        book.took("a", 3 * STEP_S, STEP_S)
    assert book.lateness("a") == pytest.approx(3.0)
    assert book.lateness("b") == 1.0
    book.decoded(1, STEP_S, ("b",))
    assert book.lateness("a") == pytest.approx(3.0), "what is not asked fades, but for the same part of both"
    book.saved("a", -0.2, 0.0)
    rest(book)
    assert book.lateness("a") == 1.0
