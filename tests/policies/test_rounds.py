"""Rounds by length without a run: each prompt as often, no clock, no order of arrival, and states that go on."""

import json
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data import PromptOrder
from policies.rounds import Race, RoundPlan, Rounds, Turn

Lengths = Callable[[Turn], list[int]]


def of(seed: int, group: int) -> Lengths:
    """Lengths of a group's responses, heavy-tailed, by its turn alone."""

    def lengths(turn: Turn) -> list[int]:
        base = hash((seed, turn)) % 1000
        return [1 + (base * (sample + 3)) % 37 + (1000 if (base + sample) % 9 == 0 else 0) for sample in range(group)]

    return lengths


def settle(rounds: Rounds, plan: RoundPlan, lengths: Lengths) -> list[Turn]:
    """Sample a round in its own order, to every end; returns what is learned from."""
    groups = [lengths(turn) for turn in plan.turns]
    chosen, long = list(range(len(groups))), list[int]()
    if plan.races:
        assert plan.mark is not None
        race = Race([len(group) for group in groups], plan.keep, plan.mark)
        for index, group in enumerate(groups):
            for tokens in group:
                race.ended(index, tokens)
        chosen, long = race.chosen(), race.long()
    rounds.settle(plan, {index: max(groups[index]) for index in chosen}, long)
    return [plan.turns[index] for index in chosen]


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.integers(1, 40),
    per_step=st.integers(1, 9),
    steps=st.integers(1, 30),
    factor=st.sampled_from([1.1, 1.25, 2.0, 3.7]),
    quantile=st.sampled_from([0.2, 0.8]),
    seed=st.integers(0, 99),
    resumed_at=st.integers(0, 30),
)
def test_each_prompt_is_learned_from_as_often_as_without_rounds(
    prompts: int, per_step: int, steps: int, factor: float, quantile: float, seed: int, resumed_at: int
) -> None:
    """In the run, and whenever an epoch has ended; in every step so many; also where the state goes through JSON."""
    order = PromptOrder(prompts, seed, True)

    def made() -> Rounds:
        return Rounds(
            factor=factor, quantile=quantile, window=64, prompts=prompts, prompts_per_step=per_step, steps=steps
        )

    rounds, learned, lengths = made(), list[Turn](), of(seed, 3)
    for step in range(steps):
        if step == resumed_at:
            state, rounds = json.loads(json.dumps(rounds.state_dict())), made()
            rounds.load_state_dict(state)
        now = settle(rounds, rounds.plan(order.take(rounds.needs)), lengths)
        assert len(now) == per_step
        learned += now
        newest = max(epoch for epoch, _ in learned)
        counts = Counter(learned)
        assert set(counts.values()) == {1}
        assert sum(epoch < newest for epoch, _ in learned) == newest * prompts, "the epochs before are complete"
    assert not rounds.put_off
    assert sorted(learned) == sorted(PromptOrder(prompts, seed, True).take(steps * per_step))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_who_is_learned_from_and_who_is_long_does_not_depend_on_what_arrives_first(data: st.DataObject) -> None:
    """Responses grow by pieces in any order, and those of groups that are out end wherever they are: the same groups
    are chosen and long as where all were sampled to their ends."""
    groups = data.draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=2, max_size=7))
    keep, mark = data.draw(st.integers(1, len(groups) - 1)), data.draw(st.integers(1, 13))
    ranked = sorted((max(group), index) for index, group in enumerate(groups))
    race = Race([len(group) for group in groups], keep, mark)
    running = {(i, j): 0 for i, group in enumerate(groups) for j in range(len(group))}
    while running:
        i, j = data.draw(st.sampled_from(sorted(running)))
        tokens = running[i, j] = min(running[i, j] + data.draw(st.integers(1, 5)), groups[i][j])
        if tokens == groups[i][j]:
            del running[i, j]
            out = race.ended(i, tokens)
        else:
            out = race.reached(i, tokens)
        assert not any(group in [index for _, index in ranked[:keep]] for group in out)
        running = {(g, sample): sampled for (g, sample), sampled in running.items() if g not in out}
    assert race.chosen() == sorted(index for _, index in ranked[:keep])
    put_off = [index for _, index in ranked[keep:]]
    assert {i for i in race.long() if i in put_off} == {i for i in put_off if max(groups[i]) >= mark}


def test_a_group_is_out_as_soon_as_it_is_long_and_cannot_be_chosen() -> None:
    race = Race([2, 2, 2], keep=1, mark=10)
    assert race.reached(0, 64) == []  # nobody has ended
    assert race.ended(1, 12) == []
    assert race.ended(1, 20) == [0]  # 64 tokens, and one group that has no more than 20
    assert race.reached(2, 19) == []
    assert race.reached(2, 21) == [2]
    assert race.chosen() == [1]
    below = Race([1, 1], keep=1, mark=100)
    below.ended(0, 5)
    assert below.reached(1, 64) == []  # below the mark: whether it is long is found out
    assert below.ended(1, 99) == []
    assert below.long() == []


def test_long_prompts_wait_for_a_round_of_their_own_and_the_others_come_first_in_the_next() -> None:
    order = PromptOrder(100, 0, False)
    rounds = Rounds(factor=2.0, quantile=0.5, window=64, prompts=100, prompts_per_step=2, steps=50)
    plan = rounds.plan(order.take(rounds.needs))
    assert (plan.turns, plan.mark, plan.races) == (((0, 0), (0, 1)), None, False)
    rounds.settle(plan, {0: 10, 1: 20}, [])
    plan = rounds.plan(order.take(rounds.needs))
    assert (len(plan.turns), plan.mark, plan.races) == (4, 10, True)
    rounds.settle(plan, {0: 5, 1: 6}, [2])
    plan = rounds.plan(order.take(rounds.needs))
    assert plan.turns == ((0, 5), (0, 6), (0, 7), (0, 8))  # (0, 4) is long
    rounds.settle(plan, {2: 5, 3: 6}, [0])
    plan = rounds.plan(order.take(rounds.needs))
    assert (plan.turns, plan.long, plan.races) == (((0, 4), (0, 5)), True, False)
    rounds.settle(plan, {0: 50, 1: 60}, [])
    assert rounds.plan(order.take(rounds.needs)).turns == ((0, 6), (0, 9), (0, 10), (0, 11))
