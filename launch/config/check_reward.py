"""Faults of `reward.terms` that one key alone does not show; see launch.config.check. Those that need the user's
functions are found by actors.rewards.check.
"""

import re
from collections.abc import Iterator

from actors.rewards.judge_template import template_fault
from config.rewards import RewardTerm
from config.tree import Config
from launch.config.issues import Issue

_TAKEN = ("mean", "std")  # reward/mean and reward/std are metrics of the whole reward
_REQUIRED = {"format": ("pattern",), "python": ("function",), "judge": ("url", "model", "template")}
_USED_BY = {
    **{
        "pattern": ("format", "judge"),
        "fallback": ("math", "reasoning_gym"),
        "memory_mb": ("code",),
        "answer": ("math", "code"),
    },
    **dict.fromkeys(("function", "prefix_sufficient", "batch_size", "cpus", "gpus"), ("python",)),
    **dict.fromkeys(("arguments", "concurrency"), ("python", "judge")),
    **dict.fromkeys(("url", "model", "template", "retries", "key_env"), ("judge",)),
}


def reward_issues(c: Config) -> Iterator[Issue]:
    """Terms that metrics could not tell apart, that lack what their kind needs, or that say what it ignores."""
    for index, term in enumerate(c.reward.terms):
        key = f"reward.terms.{index}"
        if term.label in [other.label for other in c.reward.terms[:index]]:
            yield Issue(
                f"{key}.name",
                f"two terms are called {term.label!r}, and metrics would not tell them apart",
                remedy=f"set {key}.name",
            )
        if term.label in _TAKEN:
            yield Issue(f"{key}.name", f"reward/{term.label} is of the whole reward", remedy="choose another name")
        for name in _REQUIRED.get(term.kind, ()):
            if getattr(term, name) is None:
                yield Issue(f"{key}.{name}", f"required for kind {term.kind}")
        for name, kinds in _USED_BY.items():
            if term.kind not in kinds and getattr(term, name) != RewardTerm.model_fields[name].default:
                yield Issue(f"{key}.{name}", f"only kind {' or '.join(kinds)} uses it, this term is {term.kind}")
        if term.kind == "math" and term.fallback == "auto":
            yield Issue(f"{key}.fallback", "only kind reasoning_gym uses auto", remedy="set it to last_number")
        yield from _texts(key, term)


def _texts(key: str, term: RewardTerm) -> Iterator[Issue]:
    """Patterns, templates and paths that cannot be read."""
    if term.pattern is not None:
        try:
            groups = re.compile(term.pattern).groups
        except re.error as error:
            yield Issue(f"{key}.pattern", f"not a regular expression: {error}")
        else:
            if term.kind == "judge" and groups < 1:
                said = "has no group that would be the score"
                yield Issue(f"{key}.pattern", said, remedy=r"write one, as in Score: (\d+)")
    if term.function is not None and not re.fullmatch(r"[\w.]+:\w+", term.function):
        yield Issue(f"{key}.function", f"{term.function!r} is not of the form package.module:function")
    if term.template is not None and (fault := template_fault(term.template)):
        yield Issue(f"{key}.template", fault)
