"""Faults of held-out evaluation: sets, their names, and what they ask for."""

from collections.abc import Iterator

from config.tree import Config
from launch.config.issues import Issue

TAKEN = ("source",)  # would be read as another metric's name


def response_limits(c: Config) -> Iterator[tuple[str, int]]:
    """Every key that limits the tokens of a response, and its value."""
    yield "rollout.sampling.max_new_tokens", c.rollout.sampling.max_new_tokens
    if c.eval.max_new_tokens is not None:
        yield "eval.max_new_tokens", c.eval.max_new_tokens
    for index, one in enumerate(c.eval.sets):
        if one.max_new_tokens is not None:
            yield f"eval.sets.{index}.max_new_tokens", one.max_new_tokens


def eval_issues(c: Config) -> Iterator[Issue]:
    """What contradicts itself, or would be ignored."""
    sets = c.eval_sets
    if c.eval.every > 0 and not sets:
        yield Issue("eval.every", "needs held-out prompts", remedy="set data.eval=FILE, or eval.every=0")
    if c.eval.sets and c.data.eval is not None:
        yield Issue(
            "eval.sets",
            "is set, and so is data.eval, which is one set",
            remedy="make it one of eval.sets, or leave it out",
        )
    for index, one in enumerate(c.eval.sets):
        key = f"eval.sets.{index}.name"
        if one.name in [other.name for other in c.eval.sets[:index]]:
            yield Issue(
                key, f"two sets are called {one.name!r}: metrics would not tell them apart", remedy="rename one"
            )
    for key, one in sets.items():
        if one.name in TAKEN:
            yield Issue(
                f"{key.removesuffix('.path')}.name",
                f"{one.name!r} stands for something else in metrics",
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
    """Whether any evaluation has it; sources are known when the data is read."""
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
