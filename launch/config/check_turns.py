"""Faults of `environment` beside other keys: what reads or ends a single response does not know turns."""

import re
from collections.abc import Iterator

from config.environments import EnvironmentOptions
from config.tree import Config
from launch.config.issues import Issue

KEY = "environment"
_PLACE = re.compile(r"[\w.]+:\w+")


def turn_issues(c: Config) -> Iterator[Issue]:
    """What does not go together with episodes, and rewards that need them."""
    environment = c.environment
    if environment is None:
        for index, term in enumerate(c.reward.terms):
            if term.kind == "environment":
                said = "environment, but responses are single: there is nothing that gives their turns a reward"
                yield Issue(f"reward.terms.{index}.kind", said, remedy=f"set {KEY}.factory, or another kind")
        return
    yield from _places(environment)
    given = [term for term in c.reward.terms if term.kind == "environment"]
    if environment.tools and environment.factory is None and given:
        said = "environment, but tools give no reward: every response would be worth 0"
        yield Issue("reward.terms", said, remedy="grade what the model says at last, for example with kind=math")
    if environment.max_turn_tokens is not None and environment.max_turn_tokens > c.rollout.sampling.max_new_tokens:
        said = f"{environment.max_turn_tokens} is more than rollout.sampling.max_new_tokens, of a whole episode"
        yield Issue(f"{KEY}.max_turn_tokens", said, remedy="lower it, or leave it out")
    if c.rollout.abort.enabled:
        said = (
            f"ends responses behind their answer, and gives late ones up, by lengths of single responses; {KEY} is set"
        )
        yield Issue("rollout.abort.enabled", said, remedy="set it to false")
    if c.rollout.staleness:
        said = f"{c.rollout.staleness}: what is sampled ahead is kept as single responses, and {KEY} is set"
        yield Issue("rollout.staleness", said, remedy="set it to 0")
    if c.drafter.train and c.drafter.recording.source == "learner":
        said = "learner: it records whole episodes, and the drafter would learn to say what was observed"
        yield Issue("drafter.recording.source", said, remedy="set it to engine, or drafter.train=false")


def _places(environment: EnvironmentOptions) -> Iterator[Issue]:
    """What answers the model is given once, and well named."""
    if (environment.factory is None) == (not environment.tools):
        said = "needs either a factory or tools"
        yield Issue(
            KEY, said, remedy=f"set {KEY}.factory=package.module:Class, or {KEY}.tools=[package.module:function]"
        )
    if environment.tools and environment.options:
        yield Issue(f"{KEY}.options", "are a factory's; tools take none", remedy="leave them out")
    if not environment.tools and environment.tool_format != "auto":
        yield Issue(f"{KEY}.tool_format", "is only used with tools", remedy="leave it out")
    places = [(f"{KEY}.tools.{index}", place) for index, place in enumerate(environment.tools)]
    for key, place in [*places, *([(f"{KEY}.factory", environment.factory)] if environment.factory else [])]:
        if not _PLACE.fullmatch(place):
            yield Issue(key, f"{place!r} is not of the form package.module:name")
    names = [place.partition(":")[2] for place in environment.tools]
    if len(set(names)) < len(names):
        yield Issue(f"{KEY}.tools", "two have one name, by which the model calls them", remedy="rename one of them")
