"""The canary: hand-computed verdicts, and over random histories no version comes back and every trial ends."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.drafter.acceptance import Tally
from policies.drafter.canary import MAX_WAIT, Canary, Verdict
from policies.drafter.options import CanaryOptions

OPTIONS = CanaryOptions(floor=0.5, min_drafted=100)


def settled(rate: float = 0.4, options: CanaryOptions = OPTIONS) -> Canary:
    """Version 1, measured at `rate` with the chain of four."""
    canary = Canary(options, version=1)
    canary.observe(1, "eagle:4", 1000, round(1000 * rate))
    return canary


@pytest.mark.parametrize(
    ("accepted", "verdict"), [(19, Verdict.ROLL_BACK), (20, Verdict.PASS), (0, Verdict.ROLL_BACK), (90, Verdict.PASS)]
)
def test_a_swapped_drafter_must_keep_half_of_its_acceptance(accepted: int, verdict: Verdict) -> None:
    canary = settled(0.4)
    assert canary.offer(2)
    assert canary.version == 2
    assert canary.observe(2, "eagle:4", 99, 0) is Verdict.WAIT
    canary = settled(0.4)
    canary.offer(2)
    assert canary.observe(2, "eagle:4", 100, accepted) is verdict  # expected 40, the floor is 20
    assert canary.version == (1 if verdict is Verdict.ROLL_BACK else 2)
    assert canary.rolled_back == ((2,) if verdict is Verdict.ROLL_BACK else ())
    assert canary.observe(canary.version, "eagle:4", 500, 0) is Verdict.WAIT  # once per swap


def test_what_was_rolled_back_is_never_offered_again() -> None:
    canary = settled()
    canary.offer(7)
    assert canary.observe(7, "eagle:4", 200, 0) is Verdict.ROLL_BACK
    assert not canary.offer(7)
    assert not canary.offer(5)
    assert canary.version == 1
    assert canary.offer(8)


def test_a_collapse_after_a_swap_of_the_target_has_nothing_to_go_back_to() -> None:
    canary = settled(0.4)
    canary.new_target()
    assert canary.observe(1, "eagle:4", 100, 5) is Verdict.COLLAPSED
    assert canary.version == 1
    assert canary.observe(1, "eagle:4", 1000, 50) is Verdict.WAIT
    canary.new_target()  # compared with the new level from now on
    assert canary.observe(1, "eagle:4", 1000, 50) is Verdict.PASS


def test_drafter_and_target_swapped_together_go_back_to_the_old_drafter() -> None:
    canary = settled(0.4)
    canary.new_target()
    assert canary.offer(2)
    assert canary.observe(2, "eagle:4", 100, 5) is Verdict.ROLL_BACK
    assert canary.version == 1


def test_another_strategy_is_no_collapse() -> None:
    """A tree of twelve has a third of the acceptance of a chain, with the same drafter."""
    canary = settled(0.6)
    canary.offer(2)
    assert canary.observe(2, "eagle:4x3/12", 400, 60) is Verdict.WAIT
    assert canary.observe(2, "eagle:4", 100, 58) is Verdict.PASS


def test_late_windows_of_another_version_do_not_count() -> None:
    canary = settled(0.4)
    canary.offer(2)
    assert canary.observe(1, "eagle:4", 5000, 0) is Verdict.WAIT
    assert canary.observe(3, "eagle:4", 5000, 0) is Verdict.WAIT
    assert canary.observe(2, "eagle:4", 100, 40) is Verdict.PASS


def test_low_acceptance_is_judged_on_more_tokens_and_in_the_end_let_go() -> None:
    canary = settled(0.05)
    canary.offer(2)
    assert canary.observe(2, "eagle:4", 600, 0) is Verdict.WAIT  # 15 would be the floor
    assert canary.observe(2, "eagle:4", 100, 0) is Verdict.ROLL_BACK
    canary = settled(0.01)
    canary.offer(2)
    assert canary.observe(2, "eagle:4", 100 * MAX_WAIT, 0) is Verdict.PASS


def test_the_first_weights_have_nothing_to_be_compared_with() -> None:
    canary = Canary(OPTIONS)
    assert canary.offer(1)
    assert canary.observe(1, "eagle:4", 100, 0) is Verdict.PASS


def test_accepted_tokens_were_drafted() -> None:
    with pytest.raises(ValueError, match="5 of 4"):
        Tally().add("eagle:4", 4, 5)


events = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 12)),
        st.tuples(st.just("target"), st.just(0)),
        st.tuples(st.just("steps"), st.integers(0, 400), st.floats(0, 1), st.sampled_from(["eagle:2", "eagle:4"])),
        st.tuples(st.just("late"), st.integers(0, 12)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(events, st.floats(0, 1))
@settings(max_examples=300)
def test_no_version_comes_back_and_every_trial_ends(history: list[tuple[object, ...]], floor: float) -> None:
    options = CanaryOptions(floor=floor, min_drafted=100)
    canary, used, pending = Canary(options), [0], False
    passed = {0}
    for event in history:
        verdict = Verdict.WAIT
        match event:
            case ("offer", int(version)):
                before = canary.version
                accepted = canary.offer(version)
                assert accepted == (version > max(used))
                assert canary.version == (version if accepted else before)
                if accepted:
                    used.append(version)
                    pending = True
            case ("target", _):
                canary.new_target()
                pending = True
            case ("steps", int(drafted), float(rate), str(strategy)):
                verdict = canary.observe(canary.version, strategy, drafted, round(drafted * rate))
            case ("late", int(version)) if version != canary.version:
                assert canary.observe(version, "eagle:2", 10_000, 0) is Verdict.WAIT
            case ("restart", _):
                again = Canary(options)
                again.load_state_dict(json.loads(json.dumps(canary.state_dict())))
                canary = again
        if verdict is not Verdict.WAIT:
            assert pending, "one verdict per swap"
            pending = False
        if verdict is Verdict.PASS:
            passed.add(canary.version)
        if verdict is Verdict.ROLL_BACK:
            assert canary.version in passed
            assert canary.rolled_back[-1] == used[-1]
            assert not canary.offer(used[-1])
        if verdict is Verdict.COLLAPSED:
            assert canary.version in passed
        assert len(set(canary.rolled_back)) == len(canary.rolled_back)
        assert canary.version not in canary.rolled_back
    for _ in range(MAX_WAIT + 1):
        if canary.observe(canary.version, "eagle:4", 100, 0) is not Verdict.WAIT:
            pending = False
    assert not pending


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_equal_weights_are_hardly_ever_rolled_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    canary, false_alarms = Canary(CanaryOptions(), version=0), 0
    for version in range(1, 40):
        canary.offer(version)
        for _ in range(60):
            verdict = canary.observe(canary.version, "eagle:4", 64, int(rng.binomial(64, 0.3)))
            false_alarms += verdict is Verdict.ROLL_BACK
    assert false_alarms == 0
