"""The rule of an RL step: from earlier steps only, for training only, and refused where it would change rewards."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.data.errors import DataError
from actors.data.prompts import LoadReport, PromptSet
from actors.data.stop_strings import compile_marker
from config.token_budget import AbortOptions
from contracts.rollout import FinishReason, StopRule
from examples.guess_and_check.make_data import write_all
from launch.batch import Pick
from launch.config import Config, ConfigError, load_config
from launch.config.show import resolved_lines
from launch.run.abort import AbortRule
from launch.run.groups import PromptGroup
from launch.run.inputs import answer_of, load_inputs
from launch.run.token_budget import TokenBudget
from tests.engine.test_stopping import byte_level, wrapped
from tests.launch.graded import GIVEN_UP, group_of, prompt_of

Write = Callable[..., Path]
MARKER = compile_marker([b"}"], [b"a", b"}"])
STRINGS = StopRule(strings=compile_marker([b"a"], [b"a", b"}"]))
OPTIONS = AbortOptions(enabled=True, marker="boxed", warmup_responses=10, grace_tokens=3)


def ended(*lengths: int, prompt: int = 0) -> PromptGroup:
    return group_of([1.0] * len(lengths), prompt=prompt, lengths=lengths)


def test_thresholds_come_of_what_was_observed_before_and_of_nothing_else() -> None:
    rule = AbortRule(OPTIONS, MARKER, 100)
    assert rule.rules(None, [0.1]) == [None]
    assert rule.rules(STRINGS, [0.1]) == [STRINGS]
    rule.observe([ended(*range(10, 19))])  # nine
    assert rule.rules(STRINGS, [0.1]) == [STRINGS]
    rule.observe([ended(19)])
    assert rule.rules(STRINGS, [0.1, 1.0]) == [
        StopRule(
            strings=STRINGS.strings,
            answer=MARKER,
            poll_from_tokens=11,
            grace_tokens=3,
            give_up_at_tokens=20,
            keep=keep,
        )
        for keep in (0.1, 1.0)
    ]
    planned = rule.metrics()
    assert (planned["abort/poll_from"], planned["abort/give_up_at"]) == (11, 20)
    assert (planned["abort/natural_p50"], planned["abort/natural_mean"]) == (14, 14.5)


def test_where_the_limit_comes_first_answers_end_responses_and_nobody_is_given_up() -> None:
    rule = AbortRule(OPTIONS, MARKER, 20)
    rule.observe([ended(*range(10, 20))])
    (made,) = rule.rules(None, [0.1])
    assert made is not None
    assert (made.answer, made.give_up_at_tokens) == (MARKER, None)
    assert "abort/give_up_at" not in rule.metrics()


def test_given_up_responses_have_no_natural_length_and_kept_ones_stand_for_them() -> None:
    rule = AbortRule(OPTIONS, MARKER, 100)
    rule.observe([ended(*[10] * 10)])
    late = group_of(
        [0.0] * 4,
        lengths=[13, 13, 40, 10],
        reasons=[GIVEN_UP, GIVEN_UP, None, FinishReason.ANSWERED],
        propensities=[0.1, 0.1, 0.1, 1.0],
    )
    observed = rule.observe([late])
    assert observed == {
        "abort/answered_share": 0.25,
        "abort/given_up_share": 0.5,
        "abort/kept_late_share": 0.25,
        "abort/surcharge": pytest.approx((100 + 1) / 4),
        "abort/saved_tokens": 0.0,  # no late one was known when they were given up
    }
    assert rule.metrics()["abort/natural_mean"] == pytest.approx((11 * 10 + 10 * 40) / 21)


def test_tokens_saved_are_those_that_late_responses_went_on_for() -> None:
    rule = AbortRule(OPTIONS, MARKER, 100)
    rule.observe([ended(*[10] * 90, *[40] * 6, *[60] * 4)])
    observed = rule.observe([group_of([0.0] * 2, lengths=[13, 13], reasons=[GIVEN_UP] * 2)])
    assert observed["abort/saved_tokens"] == pytest.approx(2 * (48 - 13))


def test_who_was_late_and_went_on_shows_by_its_length_where_all_of_them_go_on() -> None:
    rule = AbortRule(OPTIONS, MARKER, 100)
    rule.observe([ended(*[10] * 10)])  # late beyond 10 + 3, answered ones have ended 3 later
    assert rule.observe([ended(10, 16, 17, 40)])["abort/kept_late_share"] == 0.5


def test_a_prompt_counts_as_much_with_few_responses_as_with_many() -> None:
    rule = AbortRule(OPTIONS, MARKER, 100)
    rule.observe([ended(*[10] * 12), ended(*[30] * 4, prompt=1)])
    assert rule.metrics()["abort/natural_mean"] == pytest.approx(20)


def config_of(**abort: Any) -> Config:
    rollout = {"abort": {"enabled": True, "marker": "boxed", "warmup_responses": 16} | abort, "rollouts_per_prompt": 8}
    return Config.model_validate(
        {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout}
    )


def test_a_resumed_run_has_the_rule_that_an_uninterrupted_one_would_have() -> None:
    budget, picks = TokenBudget(config_of(), None, MARKER), [Pick(0, prompt_of(i)) for i in range(4)]
    rng = np.random.default_rng(0)
    for _ in range(3):
        budget.observe([ended(*rng.integers(5, 90, 8).tolist(), prompt=i) for i in range(4)])
        again = TokenBudget(config_of(), None, MARKER)
        again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
        plan = budget.plan(picks)
        assert plan == again.plan(picks)
        assert isinstance(plan.stop, list)
        assert [rule is not None and rule.answer is MARKER for rule in plan.stop] == [True] * 4
        assert plan.counts == [8] * 4


def test_evaluations_carry_no_rule(write_config: Write, tmp_path: Path) -> None:
    """What they are sampled with is Inputs.stop; the answer is for the planner alone, and is there where it is on."""
    write_all(tmp_path, seed=0, demonstrations=10)
    files = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.template=plain"]
    files += ["rollout.sampling.max_new_tokens=64", "data.max_prompt_tokens=16", "rollout.sampling.stop_strings=[not]"]
    with_rule = load_inputs(load_config(write_config(), [*files, "rollout.abort.enabled=true"]).config)
    without = load_inputs(load_config(write_config(), files).config)
    assert with_rule.answer is not None
    assert without.answer is None
    for inputs in (with_rule, without):
        assert inputs.stop is not None
        assert (inputs.stop.answer, inputs.stop.give_up_at_tokens) == (None, None)


ON = ["rollout.abort.enabled=true"]
PYTHON = "{kind: python, function: 'a.b:c'}"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["reward.terms=[{kind: math}, {kind: format, pattern: x}]"], "reward.terms.1.kind", "whole response"),
        ([f"reward.terms=[{{kind: math}}, {PYTHON}]"], "reward.terms.1.prefix_sufficient", "set it to true if"),
        (["reward.terms=[{kind: math, fallback: gsm8k}]"], "reward.terms.0.fallback", "set it to none"),
        (["reward.terms=[{kind: math, answer: last}]"], "reward.terms.0.answer", "leave it out"),
        (["reward.terms=[{kind: code, answer: last}]"], "reward.terms.0.answer", "leave it out"),
        (["reward.terms=[{kind: math}, {kind: code}]"], "reward.terms", "boxed and fence"),
        (["rollout.abort.marker=fence"], "rollout.abort.marker", "the reward reads boxed"),
        (
            [f"reward.terms=[{PYTHON[:-1]}, prefix_sufficient: true}}]"],
            "rollout.abort.marker",
            "boxed, fence or answer_tag",
        ),
        (
            ["rollout.abort.poll_quantile=0.9"],
            "rollout.abort.poll_quantile",
            "not below rollout.abort.abort_quantile = 0.8",
        ),
        (["objective.overlong.buffer_tokens=8"], "objective.overlong.buffer_tokens", "set it to 0"),
        (["objective.length_penalty=0.1"], "objective.length_penalty", "rollout.abort"),
        (["objective.mask_truncated=true"], "objective.mask_truncated", "set it to false"),
        (
            ["rollout.abort.enabled=false", "rollout.abort.keep=0.5"],
            "rollout.abort.keep",
            "rollout.abort.enabled is false",
        ),
    ],
)
def test_what_does_not_go_with_early_ends_is_refused(
    write_config: Write, overrides: list[str], key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), [*ON, *overrides])
    assert [issue.key for issue in caught.value.issues] == [key]
    assert said in str(caught.value)
    assert caught.value.issues[0].remedy


@pytest.mark.parametrize(
    ("terms", "marker"),
    [
        ("[{kind: math}]", "boxed"),
        ("[{kind: code}]", "fence"),
        (f"[{{kind: math}}, {PYTHON[:-1]}, prefix_sufficient: true}}]", "boxed"),
    ],
)
def test_the_marker_and_the_answer_that_counts_follow_from_the_reward(
    write_config: Write, terms: str, marker: str
) -> None:
    loaded = load_config(write_config(), [*ON, f"reward.terms={terms}"])
    assert loaded.config.rollout.abort.marker == marker
    assert loaded.source("rollout.abort.marker") == "reward.terms"
    assert loaded.config.reward.terms[0].answer == "first"
    assert loaded.source("reward.terms.0.answer") == "rollout.abort.enabled: true"
    off = load_config(write_config(), [f"reward.terms={terms.split(', {')[0].rstrip(']')}]"])
    assert off.config.rollout.abort.marker is None
    assert off.config.reward.terms[0].answer == "last"


def test_a_reward_that_is_not_written_reads_the_first_box_too(write_config: Write) -> None:
    loaded = load_config(write_config(), ON)
    assert loaded.config.reward.terms[0].answer == "first"
    assert ("answer: first", "rollout.abort.enabled: true") in [
        (line.strip(), by) for line, by in resolved_lines(loaded)
    ]


def test_an_answer_that_is_written_keeps_its_place(write_config: Write) -> None:
    loaded = load_config(write_config(), [*ON, "reward.terms=[{kind: math, answer: first}]"])
    assert loaded.source("reward.terms.0.answer") == "override"


def test_a_tag_that_the_rewards_cannot_see_is_refused_with_the_prompts() -> None:
    backend = byte_level()
    backend.add_special_tokens(["</think>"])
    prompts = PromptSet([replace(prompt_of(0), text="Q: <think>\n")], LoadReport())
    with pytest.raises(DataError, match=r"rollout\.abort: .* special tokens of the tokenizer, '</think>'"):
        answer_of(config_of(), wrapped(backend), prompts)
    assert answer_of(config_of(enabled=False), wrapped(backend), prompts) is None


def test_a_term_of_a_python_function_alone_needs_a_marker_that_is_written(write_config: Write) -> None:
    terms = f"reward.terms=[{PYTHON[:-1]}, prefix_sufficient: true}}]"
    loaded = load_config(write_config(), [*ON, terms, "rollout.abort.marker=answer_tag"])
    assert loaded.config.rollout.abort.marker == "answer_tag"
