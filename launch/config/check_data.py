"""Contradictions among prompts, evaluations, rewards and environments: a part of launch.config.check.

actors.rewards.check finds the faults that need the user's functions.
"""

import re
from collections.abc import Iterator

from actors.rewards.judge_template import template_fault
from config.environments import EnvironmentOptions
from config.rewards import RewardTerm
from config.tree import Config
from launch.config.issues import Issue

_OTHER_METRICS = ("source",)  # a set of that name would read as another metric
_WHOLE_REWARD = ("mean", "std")  # reward/mean and reward/std are metrics of the total reward


def data_issues(c: Config) -> Iterator[Issue]:
    """Yield faults of combinations; pure."""
    yield from _sets(c)
    yield from _evaluation(c)
    yield from _rewards(c)
    yield from _turns(c)


def _sets(c: Config) -> Iterator[Issue]:
    """Check the training sets and what is known of their prompts."""
    success = c.data.success
    yield from _generated(c)
    if not success.known and (success.min, success.max) != (0.0, 1.0):
        yield Issue(
            "data.success",
            "leaves prompts out by their success rate, and no rate is known",
            remedy="set data.success.field or data.success.file; rates of this very run: rollout.skip",
        )


def _generated(c: Config) -> Iterator[Issue]:
    """Check data.reasoning_gym, whose files become data.sets and eval.sets."""
    data, tasks = c.data, c.data.reasoning_gym
    key = "data.reasoning_gym"
    if data.eval is not None and any(task.eval for task in tasks):
        yield Issue(
            "data.eval",
            f"is one set, and {key} holds questions out as others",
            remedy=f"make it one of eval.sets, or set eval: 0 in {key}",
        )
    taken = {one.name for one in c.eval.sets}
    for index, task in enumerate(tasks):
        if task.name in taken:
            yield Issue(
                f"{key}.{index}.name",
                f"two sets are called {task.name!r}: metrics need different names",
                remedy=f"choose another name for this one, with dataset: {task.source}",
            )
        taken.add(task.name)


def response_limits(c: Config) -> Iterator[tuple[str, int]]:
    """Yield every key that limits the tokens of a response, and its value."""
    yield "rollout.sampling.max_new_tokens", c.rollout.sampling.max_new_tokens
    if c.eval.max_new_tokens is not None:
        yield "eval.max_new_tokens", c.eval.max_new_tokens
    for index, one in enumerate(c.eval.sets):
        if one.max_new_tokens is not None:
            yield f"eval.sets.{index}.max_new_tokens", one.max_new_tokens


def _evaluation(c: Config) -> Iterator[Issue]:
    """Check evaluation keys that contradict each other or would be ignored."""
    sets = c.eval_sets
    if c.eval.every > 0 and not sets:
        yield Issue("eval.every", "needs held-out prompts", remedy="set data.eval=FILE, or eval.every=0")
    for key, one in sets.items():
        if one.name in _OTHER_METRICS:
            yield Issue(
                f"{key.removesuffix('.path')}.name",
                f"{one.name!r} has another meaning in metrics",
                remedy="choose another name",
            )
    most = max((one.samples or 0 for one in sets.values()), default=0)
    if sets and c.eval.at is not None and max(c.eval.at) > most:
        yield Issue(
            "eval.at",
            f"pass@{max(c.eval.at)} needs as many responses per prompt, and no held-out set has more than {most}",
            remedy="raise eval.samples, or lower it",
        )
    yield from _best_metric(c)


def _best_metric(c: Config) -> Iterator[Issue]:
    """Check that some evaluation has checkpoint.best_metric. Sources are known only when the data is read."""
    metric, sets = c.checkpoint.best_metric, c.eval_sets
    if not (sets and c.checkpoint.best and c.eval.every) or "/source/" in metric:
        return
    maths = any(term.kind == "math" for term in c.reward.terms)
    by_set = {}
    for one in sets.values():
        ks = [k for k in c.eval.at or (1, one.samples or 1) if k <= (one.samples or 1)]
        by_set[one.name] = {
            "reward",
            *(f"pass@{k}" for k in ks),
            *(f"maj@{k}" for k in ks if maths and k > 1),
        }
    known = {f"eval/{name}" for name in set.intersection(*by_set.values())}
    if c.eval.sets or c.data.reasoning_gym:
        known |= {f"eval/{which}/{name}" for which, names in by_set.items() for name in names}
    if metric not in known:
        yield Issue(
            "checkpoint.best_metric", f"no evaluation has {metric}", remedy=f"one of {', '.join(sorted(known))}"
        )


def _rewards(c: Config) -> Iterator[Issue]:
    """Check for terms that metrics could not name, and texts that cannot be read."""
    for index, term in enumerate(c.reward.terms):
        key = f"reward.terms.{index}"
        if term.label in _WHOLE_REWARD:
            yield Issue(f"{key}.name", f"reward/{term.label} is of the whole reward", remedy="choose another name")
        yield from _texts(key, term)


def _texts(key: str, term: RewardTerm) -> Iterator[Issue]:
    """Check for patterns and templates that cannot be read."""
    if term.pattern is not None:
        try:
            groups = re.compile(term.pattern).groups
        except re.error as error:
            yield Issue(f"{key}.pattern", f"not a regular expression: {error}")
        else:
            if term.kind == "judge" and groups < 1:
                said = "has no group that would be the score"
                yield Issue(f"{key}.pattern", said, remedy=r"write one, as in Score: (\d+)")
    if term.template is not None and (fault := template_fault(term.template)):
        yield Issue(f"{key}.template", fault)


def _turns(c: Config) -> Iterator[Issue]:
    """Check what does not go together with episodes, and rewards that need them."""
    environment = c.environment
    if environment is None:
        for index, term in enumerate(c.reward.terms):
            if term.kind == "environment":
                said = "environment, but responses are single: there is nothing that gives their turns a reward"
                yield Issue(f"reward.terms.{index}.kind", said, remedy="set environment.factory, or another kind")
        return
    yield from _places(environment)
    given = [term for term in c.reward.terms if term.kind == "environment"]
    if environment.tools and environment.factory is None and given:
        said = "environment, but tools give no reward: every response would be worth 0"
        yield Issue("reward.terms", said, remedy="grade what the model says at last, for example with kind=math")
    if c.drafter.train and c.drafter.recording.source == "learner":
        said = "learner: it records whole episodes, and the drafter would learn to say what was observed"
        yield Issue("drafter.recording.source", said, remedy="set it to engine, or drafter.train=false")


def _places(environment: EnvironmentOptions) -> Iterator[Issue]:
    """Check that exactly one thing answers the model, under unique names."""
    if (environment.factory is None) == (not environment.tools):
        said = "needs either a factory or tools"
        yield Issue(
            "environment",
            said,
            remedy="set environment.factory=package.module:Class, or environment.tools=[package.module:function]",
        )
    names = [place.partition(":")[2] for place in environment.tools]
    if len(set(names)) < len(names):
        yield Issue(
            "environment.tools", "two have one name, by which the model calls them", remedy="rename one of them"
        )
