"""Seconds of a simulated learner: what its responses need, and what its ranks wait for."""

import pytest

from launch.config.issues import ConfigError
from planner.simulate import Scenario, simulate
from planner.simulate.learner import learner_times
from planner.simulate.study import weak
from policies.roofline.learning import token_flops

LARGE = Scenario(name="learner").but(
    fleet__layout="colocated", fleet__nodes=2, learning__overhead_s=0, lengths__max_tokens=32768
)
LONG = 32_000


def test_a_longest_response_takes_its_time_however_many_ranks_there_are() -> None:
    alone_s = [
        learner_times(LARGE.but(fleet__nodes=nodes)).learn_s([LONG, *[100] * 63 * nodes]) for nodes in (2, 16, 128)
    ]
    assert alone_s == [pytest.approx(alone_s[0], rel=0.02)] * 3
    times = learner_times(LARGE)
    net, length = times.net, LARGE.workload.prompt_tokens + LONG
    assert net is not None
    assert times.rank_flops_s is not None
    assert alone_s[-1] == pytest.approx(token_flops(net, length) * length / times.rank_flops_s, rel=0.02)


def test_even_responses_take_half_with_twice_the_ranks() -> None:
    one, two = (learner_times(LARGE.but(fleet__nodes=nodes)).learn_s([1000] * 4096) for nodes in (2, 4))
    assert one == pytest.approx(2 * two, rel=0.05)


def test_attention_is_that_of_the_responses_whatever_the_scenario_calls_their_median() -> None:
    short, long = (learner_times(LARGE.but(lengths__median=median)).learn_s([8000] * 64) for median in (10, 10_000))
    assert short == long
    mixed, even = (learner_times(LARGE).learn_s(each * 64) for each in ([1000, 15_000], [8000, 8000]))
    assert mixed > 1.01 * even, "the same tokens, and more of them late"


def test_a_learner_has_as_many_ranks_as_are_said() -> None:
    few, all_of_them = LARGE.but(learning__ranks=8), LARGE
    assert (few.learner_ranks, all_of_them.learner_ranks) == (8, 16)
    assert learner_times(few).learn_s([1000] * 4096) > 1.9 * learner_times(all_of_them).learn_s([1000] * 4096)
    assert learner_times(few).weights_s < learner_times(all_of_them).weights_s / 3, "gathered within a node"
    assert weak(few, 4).learning.ranks == 16
    with pytest.raises(ConfigError, match=r"learning\.ranks=17, but the learner's nodes have 16 GPUs"):
        LARGE.but(learning__ranks=17)


def test_a_run_without_checkpoints_writes_none() -> None:
    never = Scenario().but(
        fleet__nodes=1,
        workload__steps=2,
        workload__prompts_per_step=4,
        workload__pool=8,
        costs__source="table",
        learning__checkpoint_every=0,
        learning__tokens_s=1e6,
    )
    assert all(step.checkpoint_s == 0 for step in simulate(never).steps)
    assert simulate(never.but(learning__checkpoint_every=1)).wall_s > simulate(never).wall_s + 39
