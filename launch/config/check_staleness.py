"""Faults of rollout.staleness and rollout.partial that one key alone does not show; see launch.config.check."""

from collections.abc import Iterator

from config.rollout import PartialOptions
from config.tree import Config
from launch.config.issues import Issue

_KEY, _PARTIAL = "rollout.staleness", "rollout.partial.tokens_per_step"


def staleness_issues(c: Config) -> Iterator[Issue]:
    """What would learn from an older policy as if it were its own, or keep learner and engines from working at once."""
    partial = c.rollout.partial
    yield from _partial(c)
    if not c.rollout.staleness and partial.tokens_per_step is None:
        return
    if c.objective.sampler_correction.weights == "none":
        key, value = (_KEY, c.rollout.staleness) if c.rollout.staleness else (_PARTIAL, partial.tokens_per_step)
        yield Issue(
            "objective.sampler_correction.weights",
            f"none, but with {key}={value} tokens are of an older policy than the one that learns",
            remedy=f"leave it out (token), or set it to sequence or geometric; or leave {key} out",
        )
    if not c.rollout.staleness:
        return
    if c.cluster.layout == "colocated":
        yield Issue(
            _KEY,
            f"{c.rollout.staleness} has engines sample while the learner works, but with cluster.layout=colocated they "
            "take turns on the same GPUs",
            remedy=f"set cluster.layout=disaggregated, or {_KEY}=0",
        )
    elif c.cluster.offload == "always":
        yield Issue(
            "cluster.offload",
            f"always has engines sleep while the learner works, when {_KEY}={c.rollout.staleness} has them sample",
            remedy=f"leave it out, or set {_KEY}=0",
        )


def _partial(c: Config) -> Iterator[Issue]:
    r, limit = c.rollout, c.rollout.partial.tokens_per_step
    if limit is None:
        if r.partial != PartialOptions():
            yield Issue("rollout.partial.max_steps", "is set, but tokens_per_step is not", remedy=f"set {_PARTIAL}")
        return
    if limit >= r.sampling.max_new_tokens:
        yield Issue(
            _PARTIAL,
            f"{limit} is no less than rollout.sampling.max_new_tokens = {r.sampling.max_new_tokens}, so no response "
            "would go on",
            remedy="lower it, or leave it out",
        )
    if c.environment is not None:
        yield Issue(
            _PARTIAL,
            f"{limit}: what goes on in the next step is kept as a single response, and environment is set",
            remedy="leave one of them out",
        )
    decided = {
        "rollout.budget": r.budget.on,
        "rollout.abort": r.abort.enabled,
        "objective.dynamic_sampling": c.objective.dynamic_sampling.max_rounds > 1,
    }
    for key in (key for key, on in decided.items() if on):
        yield Issue(
            _PARTIAL,
            f"has groups end in later steps, but {key} decides by how those of this one have ended",
            remedy=f"leave one of {_PARTIAL} and {key} out",
        )
