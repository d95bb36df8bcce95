"""Environments that cannot work, and what does not go with them, are refused with their key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import ConfigError, load_config
from launch.run.inputs import tools_of

Write = Callable[..., Path]
FACTORY = "environment.factory=tests.environments.played:Counting"
TOOLS = "environment.tools=['tests.environments.played:add']"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["environment.max_turns=3"], "environment", "needs either a factory or tools"),
        ([FACTORY, TOOLS], "environment", "needs either a factory or tools"),
        (["environment.factory=nowhere"], "environment.factory", "not of the form package.module:name"),
        (["environment.tools=['a:b', 'c']"], "environment.tools.1", "not of the form"),
        (["environment.tools=['a:b', 'c:b']"], "environment.tools", "two have one name"),
        ([TOOLS, "environment.options={a: 1}"], "environment.options", "tools take none"),
        ([FACTORY, "environment.tool_format=hermes"], "environment.tool_format", "only used with tools"),
        ([TOOLS, "reward.terms=[{kind: environment}]"], "reward.terms", "tools give no reward"),
        (["reward.terms=[{kind: environment}]"], "reward.terms.0.kind", "responses are single"),
        ([FACTORY, "environment.max_turn_tokens=999999"], "environment.max_turn_tokens", "of a whole episode"),
        (
            [FACTORY, "reward.terms=[{kind: math}]", "rollout.abort.enabled=true"],
            "rollout.abort.enabled",
            "lengths of single responses",
        ),
        (
            [FACTORY, "rollout.staleness=1", "objective.sampler_correction.weights=token"],
            "rollout.staleness",
            "kept as single responses",
        ),
        (
            [FACTORY, "drafter.train=true", "rollout.workers=2", "drafter.recording.source=learner"],
            "drafter.recording.source",
            "would learn to say what was observed",
        ),
    ],
)
def test_what_cannot_work_is_refused(write_config: Write, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), overrides)
    assert [issue.key for issue in caught.value.issues] == [key]
    assert said in str(caught.value)


def test_an_environment_of_ones_own_is_the_reward_unless_another_is_written(write_config: Write) -> None:
    bare = write_config("run: {name: x}\nmodel: {path: m}\ndata: {train: t}\n")
    loaded = load_config(bare, [FACTORY])
    assert [term.kind for term in loaded.config.reward.terms] == ["environment"]
    assert loaded.origins["reward.terms"] == "environment.factory"
    assert [term.kind for term in load_config(bare, [TOOLS]).config.reward.terms] == ["math"]
    written = load_config(bare, [FACTORY, "reward.terms=[{kind: math}]"])
    assert [term.kind for term in written.config.reward.terms] == ["math"]


class Chat:
    chat_template = "{{ messages }}"


def test_a_chat_template_without_tools_is_refused_unless_one_insists(write_config: Write) -> None:
    config = load_config(write_config(), [TOOLS, "data.template=chat"]).config
    with pytest.raises(Exception, match=r"environment.tool_format: auto: the chat template shows the model no tools"):
        tools_of(config, Chat())
    config = load_config(write_config(), [TOOLS, "data.template=chat", "environment.tool_format=hermes"]).config
    assert [tool["function"]["name"] for tool in tools_of(config, Chat())] == ["add"]


def test_user_code_that_cannot_be_used_is_named(write_config: Write) -> None:
    config = load_config(write_config(), ["environment.factory=tests.environments.played:Nothing"]).config
    with pytest.raises(Exception, match=r"environment.factory: tests.environments.played:Nothing cannot be used"):
        tools_of(config, Chat())
