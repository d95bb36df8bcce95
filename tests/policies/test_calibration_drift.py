"""The drift of plain steps and of those with drafted rows: an oracle by matrices, and what it must tell apart."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.calibration.drift import NOISE, Drift


class Oracle:
    """The same filter by matrices, without a limit to surprises."""

    def __init__(self, unknown: float) -> None:
        self.state, self.cov = np.zeros(2), np.diag([unknown, unknown])

    def add(self, surprise: float, wide: bool) -> None:
        keep, seen = np.diag([1.0, 1 - 2e-3 / 8]), np.array([1.0, float(wide)])
        self.state = keep @ self.state
        self.cov = keep @ self.cov @ keep.T + np.diag([1 / 132, 2e-3])
        gain = self.cov @ seen / (seen @ self.cov @ seen + 1)
        self.state = self.state + gain * surprise
        self.cov = (np.eye(2) - np.outer(gain, seen)) @ self.cov


@settings(max_examples=50)
@given(
    st.booleans(),
    st.lists(st.tuples(st.floats(-0.3, 0.3), st.booleans()), min_size=1, max_size=200),
)
def test_it_is_the_filter_by_matrices(calibrated: bool, steps: list[tuple[float, bool]]) -> None:
    drift, oracle = Drift(calibrated), Oracle(4.0 if calibrated else 0.0)
    for surprise, wide in steps:
        drift.add(surprise, wide)
        oracle.add(surprise, wide)
    assert (drift.both, drift.wide) == pytest.approx(tuple(oracle.state), abs=1e-9)
    assert drift.doubt == pytest.approx(NOISE * math.sqrt(oracle.cov[1, 1]), rel=1e-6)


def follow(drift: Drift, both: float, wide: float, kinds: list[bool], draw: random.Random) -> None:
    for kind in kinds:
        drift.add(both + wide * kind - drift.of(kind) + draw.gauss(0, 0.1), kind)


@pytest.mark.parametrize("calibrated", [True, False])
def test_plain_steps_now_and_then_tell_dear_drafted_rows_from_a_slow_machine(calibrated: bool) -> None:
    for both, wide in ((0.0, 0.7), (0.7, 0.0), (-0.4, 0.6)):
        drift = Drift(calibrated)
        follow(drift, both, wide, [index % 32 != 31 for index in range(1200)], random.Random(0))
        assert drift.both == pytest.approx(both, abs=0.15)
        assert drift.of(True) == pytest.approx(both + wide, abs=0.15)


def test_doubt_grows_while_everything_is_drafted_and_falls_with_plain_steps() -> None:
    drift, draw = Drift(calibrated=False), random.Random(0)
    assert drift.doubt == 0.0
    follow(drift, 0.0, 0.0, [True] * 1000, draw)
    grown = drift.doubt
    assert 0.15 < grown < 0.4
    follow(drift, 0.0, 0.0, [False] * 8, draw)
    assert drift.doubt < grown / 2
    assert Drift(calibrated=True).doubt == pytest.approx(0.4)


def test_an_interrupted_step_hardly_moves_it() -> None:
    drift, draw = Drift(calibrated=True), random.Random(0)
    follow(drift, 0.0, 0.0, [index % 4 == 0 for index in range(400)], draw)
    drift.add(5.0, False)
    assert abs(drift.both) < 0.12
