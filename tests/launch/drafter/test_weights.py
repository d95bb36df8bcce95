"""Which weights engines draft with, over swaps, a collapse, a roll-back and a restart."""

import json
from pathlib import Path
from typing import Any

from contracts.rollout import DrafterFailed, DrafterLoaded
from contracts.spot import TrainFailed
from launch.drafter.training import DrafterTraining
from launch.observe.journal import read
from policies.drafter.lineage import micro_steps, returning
from tests.launch.drafter.conftest import Dispatcher, Driver, Make, drafted, kinds, micro_step, payload_of, ready


def test_a_collapse_brings_the_last_good_weights_back(
    training: DrafterTraining, driver: Driver, tmp_path: Path
) -> None:
    engines: Any = Dispatcher()
    training.published("rollout-0", ready(0))  # what the trainer starts with is what engines hold
    training.hand_out(engines, 0)
    assert engines.versions == []
    for version, target in ((10, 1), (20, 2)):
        training.published("rollout-0", ready(version))
        training.hand_out(engines, target)
        training.window(drafted(0.6))
    assert (engines.versions, engines.last) == ([10, 20], "weights 20")

    training.published("rollout-1", ready(30))
    training.published("rollout-0", ready(29))  # older than what waits
    training.hand_out(engines, 3)
    training.begin(3, engines)
    training.published("rollout-0", ready(35))  # made of the bad weights, before anybody knew
    training.window(drafted(0.1))
    assert driver.said[-1] == 3, "who trains now trains on from the bad weights"
    assert "drafter_rolled_back" in kinds(tmp_path)
    for _ in range(5):
        training.window(drafted(0.1))  # version 30 drafts until the next hand-out, and is no measure of version 20
    training.published("rollout-0", ready(41))  # made of the bad weights, and late
    training.hand_out(engines, 4)
    assert (engines.versions, engines.last) == ([10, 20, 30, returning(20, 35)], "weights 20")
    training.window(drafted(0.2))  # a third of what version 20 had: the target has changed, nothing to go back to
    assert kinds(tmp_path).count("drafter_rolled_back") == 1
    assert "drafter_collapsed" in kinds(tmp_path)

    training.published("rollout-0", ready(returning(20, 35) + 11))
    training.hand_out(engines, 5)
    assert micro_steps(engines.versions[-1]) == 31
    record = training.take(5, 1_000.0, None)
    assert (list(record.published), list(record.rolled_back), record.levels["version"]) == (
        [10, 20, 30, 35, 31],
        [30],
        31,
    )


def test_a_drafter_that_no_engine_has_is_not_trained(make: Make, driver: Driver, tmp_path: Path) -> None:
    """Until one has it again, as an engine that was restarted has."""
    training = make()
    for step in range(1, 5):
        if step == 2:
            training.event("rollout-0", DrafterFailed("eagle", "RuntimeError: no", final=True))
            training.event("rollout-1", DrafterFailed("eagle", "RuntimeError: no", final=False))
            training.event("rollout-1", DrafterFailed("suffix", "RuntimeError: no", final=True))
        if step == 3:
            training.event("rollout-1", DrafterFailed("eagle", "RuntimeError: no", final=True))
            training.event("rollout-1", DrafterLoaded("eagle", 5, 0, 0.1, "there is no drafter"))
        if step == 4:
            training.event("rollout-0", DrafterLoaded("eagle", 5, 0, 0.1))
        training.begin(step, Dispatcher())
    assert [said for said in driver.said if isinstance(said, tuple)] == [(1, True), (2, True), (3, False), (4, True)]
    assert kinds(tmp_path).count("drafter_given_up") == 1


def test_the_reason_of_a_lost_trainer_is_shown_and_its_absence_is_waited_for_by_nobody(
    training: DrafterTraining, tmp_path: Path
) -> None:
    training.begin(1, Dispatcher())
    training.event("rollout-1", micro_step())
    training.event("rollout-1", TrainFailed("process 7 ended with signal SIGKILL"))
    training.reached("sampled", 1)
    record = training.take(1, 1_000.0, None)
    assert (len(record.updates), record.counts["failures"]) == (1, 1)
    lost = [e["message"] for e in read(tmp_path / "run/events.jsonl") if e["kind"] == "trainer_lost"]
    assert lost == ["rollout-1: process 7 ended with signal SIGKILL"]


def test_a_roll_back_finds_the_last_good_weights_however_long_ago_they_passed(training: DrafterTraining) -> None:
    engines: Any = Dispatcher()
    training.published("rollout-0", ready(10))
    training.hand_out(engines, 1)
    training.window(drafted(0.6))
    for version, target in ((20, 2), (30, 3), (40, 4)):  # each is on trial when the next one comes
        training.published("rollout-0", ready(version))
        training.hand_out(engines, target)
        training.window(drafted(0.1, tokens=10))
    training.window(drafted(0.1))
    training.hand_out(engines, 5)
    assert (engines.versions, engines.last) == ([10, 20, 30, 40, returning(10, 40)], "weights 10")


def test_engines_that_draft_with_the_wanted_weights_are_told_nothing(training: DrafterTraining) -> None:
    engines: Any = Dispatcher()
    training.hand_out(engines, 0)
    training.published("rollout-0", ready(0))
    training.hand_out(engines, 1)
    training.published("rollout-0", ready(5))
    training.hand_out(engines, 2)
    training.published("rollout-1", ready(5))  # a member of the same session, or a trainer that has started again
    training.published("rollout-1", ready(4))
    training.hand_out(engines, 3)
    assert engines.versions == [5]


def test_what_comes_too_late_is_handed_out_before_anyone_trains_again(
    training: DrafterTraining, driver: Driver
) -> None:
    """Else two workers in turn would train from the same old weights, and one's work would be lost."""
    engines: Any = Dispatcher()
    training.hand_out(engines, 1)
    training.published("rollout-0", ready(5))
    assert engines.versions == []
    said: list[int] = []
    driver.rollout_started = lambda step, *, train=True: said.extend(engines.versions)  # type: ignore[method-assign]
    training.begin(2, engines)
    assert said == [5]


def test_a_resumed_run_knows_when_it_trained_and_how_well_was_drafted(
    make: Make, driver: Driver, tmp_path: Path
) -> None:
    training, engines = make({"every_steps": 3}), Dispatcher()
    training.published("rollout-0", ready(20))
    training.hand_out(engines, 1)
    training.window(drafted(0.6))
    training.event("rollout-0", micro_step())
    training.take(1, 1_000.0, None)
    training.hand_out(engines, 2)
    state = json.loads(json.dumps(training.state_dict()))

    training.save(tmp_path / "weights")

    resumed, engines = make({"every_steps": 3}), Dispatcher()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for step in (2, 3, 4):
        resumed.begin(step, engines)
    assert driver.said == [(2, False), (3, False), (4, True)]
    resumed.load(tmp_path / "weights")
    resumed.hand_out(engines, 2)
    assert engines.versions == [20], "engines draft with what they drafted with, before any trainer is up"
    resumed.published("rollout-0", ready(20))  # from the trainer's checkpoint
    resumed.published("rollout-1", ready(23))  # from a newer one
    resumed.hand_out(engines, 4)
    resumed.window(drafted(0.1))  # against 0.6, of before the restart
    resumed.hand_out(engines, 5)
    assert engines.versions == [20, 23, returning(20, 23)]
    assert engines.payloads[2].tobytes() == engines.payloads[0].tobytes() == payload_of(20).tobytes()
    assert "drafter_rolled_back" in kinds(tmp_path)


def test_a_resumed_run_whose_drafter_weights_are_lost_trusts_what_a_trainer_brings(make: Make, tmp_path: Path) -> None:
    """Its checkpoint is newer or older than the run's; there is nothing to go back to, and nobody says there is."""
    for brought in (8, 30):
        training, engines = make(), Dispatcher()
        for version in (10, 20):
            training.published("rollout-0", ready(version))
            training.hand_out(engines, 1)
            training.window(drafted(0.6))
        resumed, engines = make(), Dispatcher()
        resumed.load_state_dict(json.loads(json.dumps(training.state_dict())))
        resumed.load(tmp_path / "nothing")
        resumed.published("rollout-0", ready(brought))
        resumed.hand_out(engines, 2)
        resumed.window(drafted(0.05))
        resumed.published("rollout-0", ready(brought + 1))
        resumed.hand_out(engines, 3)
        assert engines.versions == [brought, brought + 1]
        resumed.window(drafted(0.5))
        resumed.published("rollout-0", ready(brought + 2))
        resumed.hand_out(engines, 4)
        resumed.window(drafted(0.05))
        resumed.hand_out(engines, 5)
        assert engines.versions[3:] == [returning(brought + 1, brought + 2)], "and is judged from then on"
