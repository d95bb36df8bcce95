"""Idle seconds go to what the run measured to bring more per second: early samples, or the drafter's trainer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.payoff import LASTS
from policies.idle import REVISIT, IdleTime, IdleUse, Turn

DRAFTED = 40_000  # tokens of one RL step: what is measured is hardly chance


def tally(share: float, strategy: str = "eagle:4") -> AcceptanceTally:
    return AcceptanceTally({strategy: (DRAFTED, round(share * DRAFTED))})


def use(turn: Turn, *, won_s: float = 0.0, share: float = 0.5, idle_s: float = 10.0, saved_s: float = 20.0) -> IdleUse:
    """An RL step whose idle seconds all went to one of them."""
    looked_s = idle_s if turn is Turn.LOOK else 0.0
    return IdleUse(
        looked_s=looked_s, won_s=won_s, trained_s=idle_s - looked_s, saved_s=saved_s, acceptance=tally(share)
    )


def turns(steps: int, *, won_s: float, gain: float, fades: float = 0.0, first_share: float = 0.3) -> list[Turn]:
    """Of a world in which early text wins so much in the next step, and training so much acceptance."""
    idle, share, before, found = IdleTime(), first_share, None, []
    for _ in range(steps):
        found.append(idle.turn)
        if before is not None:
            share = min(max(share * (1 + (gain if before is Turn.TRAIN else fades)), 0.01), 0.95)
        idle.observe(use(idle.turn, won_s=won_s if before is Turn.LOOK else 0.0, share=share))
        before = found[-1]
    return found


def test_each_is_tried_and_then_what_brings_more() -> None:
    looks = turns(12, won_s=8.0, gain=0.0)
    assert looks[:2] == [Turn.LOOK, Turn.TRAIN], "neither was measured"
    assert looks.count(Turn.LOOK) >= 9
    trains = turns(9, won_s=0.5, gain=0.1)
    assert trains.count(Turn.TRAIN) >= 6


def test_where_nobody_can_look_ahead_the_drafter_is_trained() -> None:
    """Idle phases too short, or nodes that decode to the end: a turn to look brings no second."""
    idle, found = IdleTime(), list[Turn]()
    for _ in range(5 * REVISIT):
        found.append(idle.turn)
        trained_s = 0.0 if idle.turn is Turn.LOOK else 10.0
        idle.observe(IdleUse(looked_s=0.0, won_s=0.0, trained_s=trained_s, saved_s=0.0, acceptance=tally(0.5)))
    assert found.count(Turn.LOOK) <= 1 + 5


def test_the_other_is_tried_again_now_and_then() -> None:
    found = turns(6 * REVISIT, won_s=8.0, gain=0.0)
    tries = [step for step, turn in enumerate(found) if turn is Turn.TRAIN and step > 3]
    assert tries
    assert all(later - earlier >= REVISIT for earlier, later in pairwise(tries))


def test_a_drafter_that_ages_without_training_is_worth_training() -> None:
    """Training only keeps the level: that is a gain over a step without it."""
    kept = turns(40, won_s=1.0, gain=0.0, fades=-0.2, first_share=0.9)
    plain = turns(40, won_s=1.0, gain=0.0, fades=0.0, first_share=0.9)
    assert kept.count(Turn.TRAIN) > plain.count(Turn.TRAIN)


def test_values_are_seconds_won_per_idle_second() -> None:
    idle, values = IdleTime(), []
    for one in (
        use(Turn.LOOK, idle_s=10.0),
        use(Turn.TRAIN, won_s=5.0, idle_s=4.0, share=0.5),
        use(Turn.LOOK, share=0.55, saved_s=20.0),
    ):
        idle.observe(one)
        values.append((idle.looking, idle.training))
    assert values[:2] == [(None, None), (0.5, None)]
    assert values[2] == (0.5, pytest.approx(LASTS * 0.1 * 20.0 / 4.0))


def test_a_change_within_chance_is_none() -> None:
    idle = IdleTime(turn=Turn.TRAIN)
    for share in (0.5, 0.52):
        few = AcceptanceTally({"eagle:4": (400, round(share * 400))})
        idle.observe(IdleUse(looked_s=0.0, won_s=0.0, trained_s=4.0, saved_s=20.0, acceptance=few))
    assert idle.training == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(-5, 50), st.floats(0, 50), st.floats(-5, 50), st.floats(0, 1)),
        max_size=60,
    )
)
def test_neither_is_forgotten_whatever_is_measured(steps: list[tuple[float, float, float, float, float]]) -> None:
    idle, since = IdleTime(), {Turn.LOOK: 0, Turn.TRAIN: 0}
    for looked_s, won_s, trained_s, saved_s, share in steps:
        since = {turn: 0 if turn is idle.turn else count + 1 for turn, count in since.items()}
        assert max(since.values()) <= REVISIT
        idle.observe(
            IdleUse(looked_s=looked_s, won_s=won_s, trained_s=trained_s, saved_s=saved_s, acceptance=tally(share))
        )
