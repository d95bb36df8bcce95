"""The canary: hand-computed verdicts, and over random histories no version comes back and every trial ends."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.drafter import CanaryOptions
from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.canary import MAX_WAIT, Canary, CanaryVerdict
from policies.drafter.lineage import micro_steps, returning
from tests.policies.drafting import rollout

OPTIONS = CanaryOptions(floor=0.5, min_drafted=100)
BAD, SAME = 0.05, 0.4


def settled(rate: float = SAME, options: CanaryOptions = OPTIONS, tokens: int = 4000) -> Canary:
    """Version 1, measured at `rate` with the chain of four."""
    canary = Canary(options, version=1)
    canary.observe(1, "eagle:4", tokens, round(tokens * rate))
    return canary


def drafts(canary: Canary, rate: float, tokens: int = 1600, strategy: str = "eagle:4") -> CanaryVerdict:
    """The first verdict on what its version drafts at `rate`, in steps of 100 tokens."""
    for _ in range(tokens // 100):
        verdict = canary.observe(canary.version, strategy, 100, round(100 * rate))
        if verdict is not CanaryVerdict.WAIT:
            return verdict
    return CanaryVerdict.WAIT


@pytest.mark.parametrize(
    ("rate", "verdict"),
    [
        (0.1, CanaryVerdict.ROLL_BACK),
        (0.3, CanaryVerdict.PASS),
        (0.0, CanaryVerdict.ROLL_BACK),
        (0.9, CanaryVerdict.PASS),
    ],
)
def test_a_swapped_drafter_must_keep_half_of_its_acceptance(rate: float, verdict: CanaryVerdict) -> None:
    canary = settled()
    assert canary.offer(2)
    assert canary.version == 2
    assert canary.observe(2, "eagle:4", 99, 0) is CanaryVerdict.WAIT
    canary = settled()
    canary.offer(2)
    assert drafts(canary, rate) is verdict
    assert canary.version == (returning(1, 2) if verdict is CanaryVerdict.ROLL_BACK else 2)
    assert canary.rolled_back == ((2,) if verdict is CanaryVerdict.ROLL_BACK else ())
    assert canary.observe(canary.version, "eagle:4", 500, 0) is CanaryVerdict.WAIT  # once per trial


def test_the_standard_error_is_that_of_whole_drafts() -> None:
    """By hand: 100 drafts of four with 40 % accepted, 25 with 20 %. Weight 20; (0.2 - 0.5 * 0.4) = 0."""
    now, before = AcceptanceTally({"eagle:4": (100, 20)}), AcceptanceTally({"eagle:4": (400, 160)})
    found = now.against(before, 0.5)
    assert found is not None
    assert (found.level, found.sigmas) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))
    now_rate, then_rate = (0.2 * 25 + 1) / 27, (0.4 * 100 + 1) / 102
    variance = now_rate * (1 - now_rate) / 25 + 0.25 * then_rate * (1 - then_rate) / 100
    assert found.error == pytest.approx(variance**0.5 / 0.4)
    whole = now.against(before)
    assert whole is not None
    assert whole.sigmas == pytest.approx(
        -0.2 / (now_rate * (1 - now_rate) / 25 + then_rate * (1 - then_rate) / 100) ** 0.5
    )


def test_what_was_rolled_back_or_made_of_it_is_never_offered_again() -> None:
    canary = settled()
    canary.offer(7)
    assert drafts(canary, BAD) is CanaryVerdict.ROLL_BACK
    assert not any(canary.offer(version) for version in (5, 7, 8, 500))  # a trainer went on from 7
    assert micro_steps(canary.version) == 1
    assert canary.version > 500
    assert canary.offer(canary.version + 3)  # one that goes on from the weights that came back


def test_a_collapse_after_a_swap_of_the_target_has_nothing_to_go_back_to() -> None:
    canary = settled()
    canary.new_target()
    assert drafts(canary, BAD) is CanaryVerdict.COLLAPSED
    assert canary.version == 1
    assert canary.observe(1, "eagle:4", 1000, 50) is CanaryVerdict.WAIT
    canary.new_target()  # compared with the new level from now on
    assert drafts(canary, BAD) is CanaryVerdict.PASS


def test_drafter_and_target_swapped_together_go_back_to_the_old_drafter() -> None:
    canary = settled()
    canary.new_target()
    assert canary.offer(2)
    assert drafts(canary, BAD) is CanaryVerdict.ROLL_BACK
    assert micro_steps(canary.version) == 1


def test_what_every_rl_step_adds_little_to_is_judged_all_the_same() -> None:
    """30 drafted tokens per RL step, each with new weights of the target, and of the drafter."""
    for offers in (True, False):
        canary, found = settled(), CanaryVerdict.WAIT
        for step in range(2, 40):
            canary.new_target()
            if offers:
                canary.offer(step)
            found = canary.observe(canary.version, "eagle:4", 30, 0)
            if found is not CanaryVerdict.WAIT:
                break
        assert found is (CanaryVerdict.ROLL_BACK if offers else CanaryVerdict.COLLAPSED)


def test_another_strategy_is_no_collapse() -> None:
    """A tree of twelve has a third of the acceptance of a chain, with the same drafter."""
    canary = settled(0.6)
    canary.offer(2)
    assert canary.observe(2, "eagle:4x3/12", 400, 60) is CanaryVerdict.WAIT
    assert drafts(canary, 0.58, strategy="eagle:4") is CanaryVerdict.PASS


def test_a_strategy_that_was_hardly_used_before_says_little() -> None:
    """All of one draft of four was accepted: against that a third looks like a fall to a third."""
    canary = settled(tokens=200)
    canary.observe(1, "eagle:2", 4, 4)
    canary.offer(2)
    assert drafts(canary, 0.4, strategy="eagle:2") is CanaryVerdict.PASS


def test_late_windows_of_another_version_do_not_count() -> None:
    canary = settled()
    canary.offer(2)
    assert canary.observe(1, "eagle:4", 5000, 0) is CanaryVerdict.WAIT
    assert canary.observe(3, "eagle:4", 5000, 0) is CanaryVerdict.WAIT
    assert drafts(canary, 0.4) is CanaryVerdict.PASS


def test_low_acceptance_is_judged_on_more_tokens_and_in_the_end_let_go() -> None:
    canary = settled(0.1, tokens=8000)
    canary.offer(2)
    assert drafts(canary, 0.0, 300) is CanaryVerdict.WAIT
    assert drafts(canary, 0.0, 500) is CanaryVerdict.ROLL_BACK
    canary = settled(0.01)
    canary.offer(2)
    assert drafts(canary, 0.0, 100 * MAX_WAIT) is CanaryVerdict.PASS


def test_the_first_weights_have_nothing_to_be_compared_with() -> None:
    canary = Canary(OPTIONS)
    assert canary.offer(1)
    assert canary.observe(1, "eagle:4", 100, 0) is CanaryVerdict.PASS


def test_weights_that_take_the_place_of_lost_ones_are_trusted() -> None:
    canary = settled()
    canary.offer(9)
    canary.trust(5)
    assert (canary.version, canary.good) == (5, 5)
    assert drafts(canary, BAD) is CanaryVerdict.WAIT
    assert canary.offer(6)


def test_accepted_tokens_were_drafted() -> None:
    with pytest.raises(ValueError, match="5 of 4"):
        AcceptanceTally().add("eagle:4", 4, 5)


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
    canary, used, newest, pending = Canary(options), [0], 0, False
    passed = {0}
    for event in history:
        verdict = CanaryVerdict.WAIT
        match event:
            case ("offer", int(version)):
                before = canary.version
                accepted = canary.offer(version)
                assert accepted == (version > newest)
                assert canary.version == (version if accepted else before)
                if accepted:
                    newest = version
                    used.append(version)
                    pending = True
            case ("target", _):
                canary.new_target()
                pending = True
            case ("steps", int(drafted), float(rate), str(strategy)):
                verdict = canary.observe(canary.version, strategy, drafted, round(drafted * rate))
            case ("late", int(version)) if version != canary.version:
                assert canary.observe(version, "eagle:2", 10_000, 0) is CanaryVerdict.WAIT
            case ("restart", _):
                again = Canary(options)
                again.load_state_dict(json.loads(json.dumps(canary.state_dict())))
                canary = again
        if verdict is not CanaryVerdict.WAIT:
            assert pending, "one verdict per swap"
            pending = False
        if verdict is CanaryVerdict.PASS:
            passed.add(canary.version)
        if verdict is CanaryVerdict.ROLL_BACK:
            assert canary.version == returning(max(passed), newest)
            assert canary.rolled_back[-1] == used[-1]
            assert not canary.offer(used[-1])
            newest = canary.version
            passed.add(newest)
        if verdict is CanaryVerdict.COLLAPSED:
            assert canary.version in passed
        assert len(set(canary.rolled_back)) == len(canary.rolled_back)
        assert canary.version not in canary.rolled_back
    if pending:
        assert drafts(canary, 0.0, 200 * MAX_WAIT) is not CanaryVerdict.WAIT


@pytest.mark.parametrize("floor", [0.5, 1.0])
@pytest.mark.parametrize("drafted", [20, 200])
def test_at_constant_acceptance_hardly_any_verdict_is_a_false_one(floor: float, drafted: int) -> None:
    """35 % per token, three strategies, `drafted` drafts per RL step, new weights in each: at most 1 % of the verdicts,
    over 40 runs of 40 RL steps."""
    false = verdicts = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        canary = Canary(CanaryOptions(floor=floor))
        for _ in range(40):
            canary.new_target()
            canary.offer(canary.newest + 5)
            for strategy, tokens, accepted in rollout(rng, 0.35, drafted):
                verdict = canary.observe(canary.version, strategy, tokens, accepted)
                verdicts += verdict is not CanaryVerdict.WAIT
                false += verdict in (CanaryVerdict.ROLL_BACK, CanaryVerdict.COLLAPSED)
    assert verdicts > 40
    assert false <= 0.01 * verdicts
