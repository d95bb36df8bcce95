"""The rounds of one RL step with dynamic sampling; workers and graders are a table of rewards."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from actors.data import PromptOrder
from config.objective import DynamicSamplingOptions, ObjectiveOptions
from config.rollout import PartialOptions
from contracts.rollout import SamplingParams
from launch.batch import Batch
from launch.dispatch.ledger import FailedRequest
from launch.errors import PacelineError
from launch.interrupt import Interrupted
from launch.run.collect import Round
from launch.run.record import refill_metrics
from launch.run.rl_step import sample
from launch.run.token_budget import BudgetPlan
from policies.lengths import LengthModel
from tests.launch.graded import group_of, prompt_of, stats_of

PROMPTS = 20
WANTED = 4
Rewards = Callable[[int], list[float]]


class World:
    """A job whose collector grades by prompt, and writes down what it was asked for."""

    def __init__(self, rewards: Rewards, max_rounds: int, **objective: Any) -> None:
        self.asked: list[list[int]] = []
        self.ids: list[int] = []
        self.phases: list[tuple[str, bool]] = []
        self.spare: list[bool] = []
        self.interrupt_at: int | None = None
        self._rewards = rewards
        self.job: Any = SimpleNamespace(
            config=SimpleNamespace(
                run=SimpleNamespace(seed=3),
                rollout=SimpleNamespace(prompts_per_step=WANTED, partial=PartialOptions(), rollouts_per_prompt=2),
                objective=ObjectiveOptions(dynamic_sampling=DynamicSamplingOptions(max_rounds=max_rounds), **objective),
            ),
            prompts=[prompt_of(i) for i in range(PROMPTS)],
            order=PromptOrder(PROMPTS, 3, True),
            lengths=LengthModel(8.0),
            budget=SimpleNamespace(
                plan=lambda picks: BudgetPlan(counts=[2] * len(picks), stop=None, metrics={}),
                observe=lambda groups: {},
            ),
            sampling=SamplingParams(8),
            stop=None,
            collector=self,
            skip=None,
            rounds=None,
            drafter=None,
            steps_done=0,
            carried=[],
            dispatcher=SimpleNamespace(),
            lookahead=None,
        )

    def run(self, batch: Batch, phase: str, *, same_step: bool, spare: bool, **_: Any) -> Round:
        self.spare.append(spare)
        if self.interrupt_at == len(self.asked):
            raise Interrupted("SIGINT")
        self.asked.append([pick.prompt.prompt_id for pick in batch.picks])
        self.ids += [request.request_id for request in batch.requests]
        self.phases.append((phase, same_step))
        groups = [group_of(self._rewards(pick.prompt.prompt_id), prompt=pick.prompt.prompt_id) for pick in batch.picks]
        return Round(groups=groups, stats=stats_of(len(batch)), rollout_s=1.0, reward_wait_s=0.5)


def order(count: int) -> list[int]:
    return [index for _, index in PromptOrder(PROMPTS, 3, True).take(count)]


def mixed(prompt: int) -> list[float]:
    return [1.0, 0.0]


def every_other(prompt: int) -> list[float]:
    return [1.0, float(prompt % 2)]


def never(prompt: int) -> list[float]:
    return [1.0, 1.0]


@pytest.mark.parametrize(("rewards", "max_rounds"), [(mixed, 5), (never, 1), (every_other, 1)])
def test_there_is_one_round_where_nothing_is_missing_or_nothing_is_asked_for(rewards: Rewards, max_rounds: int) -> None:
    world = World(rewards, max_rounds)
    assert len(sample(world.job, 1)) == 1
    assert world.asked == [order(WANTED)]
    assert world.phases == [("rollout", False)]


def test_rounds_take_the_next_prompts_of_the_order_until_enough_groups_have_signal() -> None:
    world = World(every_other, 10)
    rounds = sample(world.job, 1)
    asked = [prompt for prompts in world.asked for prompt in prompts]
    assert asked == order(len(asked))
    assert world.ids == list(range(2 * len(asked)))  # as the buffer of hidden states knows its records
    assert sum(prompt % 2 == 0 for prompt in asked) >= WANTED
    assert sum(prompt % 2 == 0 for prompts in world.asked[:-1] for prompt in prompts) < WANTED
    assert world.phases[1:] == [("refill", True)] * (len(rounds) - 1)
    assert world.job.order.take(1) == PromptOrder(PROMPTS, 3, True).take(len(asked) + 1)[-1:]


def test_rounds_end_at_max_rounds() -> None:
    world = World(never, 3)
    rounds = sample(world.job, 1)
    assert [len(prompts) for prompts in world.asked] == [WANTED] * 3
    assert refill_metrics(rounds) == {"groups/rounds": 3.0, "groups/refilled": 8.0, "tokens/refilled": 160.0}


def test_a_resumed_step_asks_for_what_the_interrupted_one_asked_for() -> None:
    """Interrupted in the second round; the checkpoint's prompt order is that of before the step."""
    undisturbed = World(every_other, 10)
    sample(undisturbed.job, 1)
    world = World(every_other, 10)
    before = world.job.order.state_dict()
    world.interrupt_at = 1
    with suppress(Interrupted):
        sample(world.job, 1)
    assert len(world.asked) == 1
    resumed = World(every_other, 10)
    resumed.job.order.load_state_dict(before)
    sample(resumed.job, 1)
    assert resumed.asked == undisturbed.asked


def test_each_round_gives_idle_workers_their_spare_time() -> None:
    """A drafter may train in the tail of every round, on behalf of the one RL step."""
    world = World(every_other, 10)
    rounds = sample(world.job, 1)
    assert len(rounds) > 1
    assert world.spare == [True] * len(rounds)


def test_a_first_round_without_any_grade_raises_and_a_later_one_does_not() -> None:
    world = World(lambda prompt: [], 3)
    lost = stats_of(1, FailedRequest(0, "lost"))
    empty = Round(groups=[group_of([])], stats=lost, rollout_s=1.0, reward_wait_s=0.0)
    world.run = lambda *_, **__: empty  # type: ignore[method-assign]
    with pytest.raises(PacelineError, match="rollout 0: lost"):
        sample(world.job, 1)
    first = set(order(WANTED))
    later = World(lambda prompt: [1.0, 1.0] if prompt in first else [], 3)
    assert len(sample(later.job, 1)) == 3
