"""Faults of rollout.staleness that one key alone does not show; see launch.config.check."""

from collections.abc import Iterator

from launch.config.issues import Issue
from launch.config.tree import Config

_KEY = "rollout.staleness"


def staleness_issues(c: Config) -> Iterator[Issue]:
    """What would learn from an older policy as if it were its own, or keep learner and engines from working at once."""
    if not c.rollout.staleness:
        return
    if c.objective.sampler_correction.weights == "none":
        yield Issue(
            "objective.sampler_correction.weights",
            f"none, but with {_KEY}={c.rollout.staleness} responses are of an older policy than the one that learns",
            remedy=f"leave it out (token), or set it to sequence or geometric; or {_KEY}=0",
        )
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
