"""Passing over settled prompts in RL steps; workers and graders are a table of rewards."""

import pytest

from actors.data import PromptOrder
from config.token_budget import SkipOptions
from launch.run.record import rollout_metrics
from launch.run.rl_step import sample
from launch.run.skip import next_picks
from policies.token_budget.skip import PromptSkip
from tests.launch.graded import prompt_of
from tests.launch.test_dynamic_sampling import PROMPTS, WANTED, Rewards, World, every_other, mixed, never

ALL = [prompt_of(i) for i in range(PROMPTS)]
STEPS_OF_AN_EPOCH = PROMPTS // WANTED


def skipping(keep: float = 1e-9, after: int = 1) -> PromptSkip:
    return PromptSkip(SkipOptions(after=after, keep=keep), seed=3)


def world_with(skip: PromptSkip | None, rewards: Rewards, max_rounds: int = 1) -> World:
    world = World(rewards, max_rounds)
    world.job.skip = skip
    return world


def steps(world: World, count: int) -> list[dict[str, float]]:
    """The metrics of so many RL steps."""
    return [rollout_metrics(sample(world.job, 1)) for _ in range(count)]


def test_settled_prompts_are_passed_over_and_the_order_goes_on() -> None:
    world = world_with(skipping(), every_other)
    first = steps(world, STEPS_OF_AN_EPOCH)
    assert [row["skip/passed_over"] for row in first] == [0.0] * STEPS_OF_AN_EPOCH, "nothing is known of any yet"
    later = steps(world, 4)
    asked = [prompt for prompts in world.asked[STEPS_OF_AN_EPOCH:] for prompt in prompts]
    turns = [index for _, index in PromptOrder(PROMPTS, 3, True).take(4 * PROMPTS)][PROMPTS:]
    assert asked == [prompt for prompt in turns if prompt % 2 == 0][: 4 * WANTED], "odd ones are always solved"
    passed_over = sum(row["skip/passed_over"] for row in later)
    assert passed_over > 0
    taken = world.job.order.state_dict()["epoch"] * PROMPTS + world.job.order.state_dict()["position"]
    assert taken == PROMPTS + len(asked) + passed_over
    for row in later:
        assert row["skip/share"] == row["skip/passed_over"] / (row["skip/passed_over"] + WANTED)


def test_without_it_the_picks_are_those_of_the_order() -> None:
    one, other = PromptOrder(PROMPTS, 3, True), PromptOrder(PROMPTS, 3, True)
    picks, passed_over = next_picks(one, ALL, 50, None)
    assert [(pick.epoch, pick.prompt.prompt_id) for pick in picks] == other.take(50)
    assert passed_over == 0
    assert "skip/share" not in steps(world_with(None, never), 1)[0]


def test_in_the_first_epoch_it_never_acts() -> None:
    world = world_with(skipping(), never)
    steps(world, STEPS_OF_AN_EPOCH)
    assert sorted(prompt for prompts in world.asked for prompt in prompts) == list(range(PROMPTS))


def test_never_more_than_a_whole_epoch_is_passed_over_in_a_row() -> None:
    """Everything is settled, and the coin keeps nothing: a run samples all the same."""
    world = world_with(skipping(), never)
    steps(world, STEPS_OF_AN_EPOCH)
    row = steps(world, 1)[0]
    assert len(world.asked[-1]) == WANTED
    assert row["skip/passed_over"] == WANTED * PROMPTS


def test_rounds_of_dynamic_sampling_are_counted_together() -> None:
    world = world_with(skipping(keep=0.5), every_other, max_rounds=10)
    several = []
    taken = 0
    for _ in range(20):
        rounds = sample(world.job, 1)
        row = rollout_metrics(rounds)
        state = world.job.order.state_dict()
        turns = state["epoch"] * PROMPTS + state["position"] - taken
        taken += turns
        sampled = sum(len(collected.groups) for collected in rounds)
        assert row["skip/passed_over"] == turns - sampled
        assert row["skip/share"] == (turns - sampled) / turns
        several.append(sum(collected.metrics["skip/passed_over"] > 0 for collected in rounds) > 1)
    assert any(several), "in one step, in more than one round"


@pytest.mark.parametrize("done", [3, 7])
def test_a_resumed_run_asks_for_what_an_uninterrupted_one_asks_for(done: int) -> None:
    undisturbed = world_with(skipping(keep=0.5), every_other)
    steps(undisturbed, 20)
    first, second = world_with(skipping(keep=0.5), every_other), world_with(skipping(keep=0.5), every_other)
    steps(first, done)
    second.job.order.load_state_dict(first.job.order.state_dict())
    second.job.skip.load_state_dict(first.job.skip.state_dict())
    steps(second, 20 - done)
    assert first.asked + second.asked == undisturbed.asked


def test_groups_that_teach_are_never_passed_over() -> None:
    world, plain = world_with(skipping(), mixed), world_with(None, mixed)
    assert all(row["skip/passed_over"] == 0 for row in steps(world, 12))
    steps(plain, 12)
    assert world.asked == plain.asked
