"""What an evaluation makes of graded responses: means over prompts, pass@k, maj@k, sources, sets."""

from dataclasses import replace
from typing import Any

import pytest

from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import Grade
from launch.run.groups import PromptGroup
from launch.run.measures import Votes, named, set_metrics, votes_of
from policies.pass_at import majority_at, pass_at
from tests.launch.graded import group_of, groups_of

MATHS = RewardOptions()
OTHER = RewardOptions(terms=(RewardTerm(kind="format", pattern="x"),))


def answered(*answers: str | None, gold: str, reward: float = 1.0) -> PromptGroup:
    """Responses that box these answers; None: without one."""
    group = group_of([0.0] * len(answers))
    members = [
        replace(
            member,
            text="no idea" if answer is None else rf"So it is \boxed{{{answer}}}.",
            grade=Grade(value=reward * (answer == gold), parts={"math": float(answer == gold)}),
        )
        for member, answer in zip(group.members, answers, strict=True)
    ]
    return PromptGroup(group.pick, members)


def of_source(group: PromptGroup, source: str) -> PromptGroup:
    return PromptGroup(replace(group.pick, prompt=replace(group.pick.prompt, source=source)), group.members)


def test_means_are_over_prompts_however_many_responses_they_have() -> None:
    groups = groups_of([1.0, 0.0, 0.0, 0.0], [1.0, 1.0])
    found = set_metrics(groups, [1, 2, 4], OTHER)
    assert found["reward"] == found["pass@1"] == (0.25 + 1.0) / 2
    assert found["pass@2"] == (pass_at(2, 1, 4) + 1.0) / 2
    assert found["pass@4"] == 1.0, "of the prompt that has four"
    assert found["prompt_std"] == pytest.approx(0.375)
    assert not [name for name in found if name.startswith("maj@")], "no term reads answers"


def test_right_is_what_earns_enough() -> None:
    groups = groups_of([1.1, 0.9, 0.1, 0.9999999999])
    assert set_metrics(groups, [1], OTHER)["pass@1"] == 0.5
    lower = OTHER.model_copy(update={"right_from": 0.5})
    assert set_metrics(groups, [1], lower)["pass@1"] == 0.75


def test_the_majority_is_of_equal_answers_not_of_equal_texts() -> None:
    group = answered("7", r"\frac{1}{2}", "0.5", "7", "1/2", None, "8", gold="7")
    assert votes_of(group, MATHS) == Votes(right=2, wrong=(3, 1), silent=1)
    found = set_metrics([group], [1, 3, 7], MATHS)
    assert found["maj@3"] == pytest.approx(majority_at(3, 2, [3, 1], 1))
    assert found["maj@7"] == 0.0
    assert "maj@1" not in found


def test_the_majority_goes_by_the_answer_whatever_else_the_reward_asks_for() -> None:
    group = answered("7", "7", "8", gold="7", reward=0.5)
    found = set_metrics([group], [3], MATHS)
    assert (found["pass@3"], found["maj@3"]) == (0.0, 1.0)


def test_ungraded_responses_count_neither_for_nor_against() -> None:
    group = answered("7", "8", "8", gold="7")
    failed = replace(group.members[2], grade=Grade(value=0.0, error="no"))
    found = set_metrics([PromptGroup(group.pick, [*group.members[:2], failed])], [2, 3], MATHS)
    assert (found["reward"], found["pass@2"], found["maj@2"]) == (0.5, 1.0, 0.5)
    assert "pass@3" not in found
    assert set_metrics([PromptGroup(group.pick, [failed])], [1], MATHS) == {}


def test_every_source_has_its_own_numbers() -> None:
    groups = [
        of_source(group, source)
        for group, source in zip(groups_of([1.0], [0.0], [1.0]), ("easy", "hard", "hard"), strict=True)
    ]
    found = set_metrics(groups, [1], OTHER)
    assert (found["source/easy/reward"], found["source/hard/reward"], found["source/hard/pass@1"]) == (1.0, 0.5, 0.5)
    assert found["reward"] == pytest.approx(2 / 3)


def test_sets_count_alike_and_have_names_where_there_are_several() -> None:
    one: dict[str, Any] = {"reward": 0.2, "pass@4": 0.4, "source/x/reward": 0.1}
    assert named({"eval": one}, alone=True) == {"eval/reward": 0.2, "eval/pass@4": 0.4, "eval/source/x/reward": 0.1}
    found = named({"a": one, "b": {"reward": 0.6, "pass@8": 0.9}}, alone=False)
    assert found["eval/reward"] == pytest.approx(0.4)
    assert found["eval/a/pass@4"] == 0.4
    assert "eval/pass@4" not in found, "not all have it"
    assert "eval/source/x/reward" not in found
    assert found["eval/a/source/x/reward"] == 0.1
