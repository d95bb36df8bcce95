"""Moments are seeded, and the drawing shows every ratio."""

from pathlib import Path

from benchmarks.interference import RATIOS, figure
from tests.train.killing import Moment


def test_moments_are_seeded_and_reach_every_step() -> None:
    moments = [Moment.draw(seed, 5) for seed in range(100)]
    assert moments == [Moment.draw(seed, 5) for seed in range(100)]
    assert {moment.step for moment in moments} == {1, 2, 3, 4, 5}
    assert all(0 <= moment.share <= 1 for moment in moments)


def test_every_ratio_is_drawn(tmp_path: Path) -> None:
    figure(tmp_path / "x.svg", {name: [1.0, 0.97, 1.2] for name in RATIOS})
    drawn = (tmp_path / "x.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in RATIOS)
