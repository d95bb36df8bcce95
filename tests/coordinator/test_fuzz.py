"""The long search for broken rules: what it counts is what happened."""

import random

import pytest

from tests.coordinator import fuzz, random_events


def test_violations_are_counted_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.over(fuzz.sequence, range(3)) == {"cases": 3, "events": 90}
    assert fuzz.over(fuzz.world, range(3))["violations"] == 0

    def broken(*_: object) -> None:
        raise AssertionError("two sessions")

    monkeypatch.setattr(random_events, "check_invariants", broken)
    assert fuzz.over(fuzz.sequence, range(2))["violations"] == 2
    assert "sequence 0: two sessions" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="two sessions"):
        random_events.random_sequence(random.Random(1), 30)
