"""A step that the driver does not wait for, and what becomes of it when the learner is lost, or it is given up; with
test_failover's group, which only counts."""

from pathlib import Path

from tests.launch.failover_world import World, made, sequences


def test_a_group_that_is_lost_while_others_sample_is_made_again_for_whoever_needs_its_weights(tmp_path: Path) -> None:
    """They are those that workers hold, not those of the step under way, which is begun again."""
    world, events = World(), list[str]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        checksum = learner.publish(1)[0].checksum
        assert not learner.busy
        learner.begin_step(sequences(2), 2)
        assert learner.renew(), "the rank may be well: nobody may ask it while it works"
        assert world.renewed() == []
        world.ended, world.losses = True, {len(world.calls): False}
        assert learner.renew()
        assert [event.manifest.checksum for event in world.renewed()] == [checksum]
        once_more = learner.step_result()
        assert not learner.busy
        assert [len(world.groups), len(learner._kept)] == [2, 2]
    alone = World()
    with made(alone, tmp_path / "alone", []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        assert learner.train_step(sequences(2), 2).losses == once_more.losses


def test_a_step_that_is_given_up_leaves_the_learner_at_the_one_before(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        learner.begin_step(sequences(2), 2)
        assert learner.rewind()
        assert not learner.busy
        assert world.groups[1].state == ["initial", "begin 9", "1 None [[1, 2]]"]


def test_metrics_are_of_the_step(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, [], clock=iter(range(100)).__next__) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        metrics, seconds = learner.take()
        assert (metrics["learner/restarts"], metrics["learner/repeated_steps"], seconds) == (0, 0, {})
        assert metrics["learner/kept_bytes"] > 0
        world.losses = {len(world.calls): False}
        learner.publish(1)
        metrics, seconds = learner.take()
        assert (metrics["learner/restarts"], metrics["learner/repeated_steps"]) == (1, 1)
        assert seconds == {"recover": 1.0}
        assert learner.take() == ({**metrics, "learner/restarts": 0.0, "learner/repeated_steps": 0.0}, {})
