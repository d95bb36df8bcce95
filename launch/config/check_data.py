"""Faults of what is trained on: sets, their names, what is known of their prompts, and which are passed over."""

from collections.abc import Iterator

from config.tree import Config
from launch.config.issues import Issue


def set_issues(c: Config) -> Iterator[Issue]:
    """What contradicts itself, or would be ignored."""
    data, skip, success = c.data, c.rollout.skip, c.data.success
    if data.sets and data.train is not None:
        yield Issue(
            "data.sets",
            "is set, and data.train is one set beside them",
            remedy="make it one of data.sets, or leave it out",
        )
    for index, one in enumerate(data.sets):
        if one.name in [other.name for other in data.sets[:index]]:
            yield Issue(
                f"data.sets.{index}.name",
                f"two sets are called {one.name!r}: metrics would not tell them apart",
                remedy="rename one",
            )
    yield from _generated(c)
    if success.field is not None and success.file is not None:
        yield Issue("data.success.file", "is set, and so is data.success.field", remedy="leave one of them out")
    if success.min > success.max:
        yield Issue("data.success.min", f"{success.min:g} is more than data.success.max", remedy="lower it")
    if not success.known and (success.min, success.max) != (0.0, 1.0):
        yield Issue(
            "data.success",
            "leaves prompts out by their success rate, and no rate is known",
            remedy="set data.success.field or data.success.file; rates of this very run: rollout.skip",
        )
    if skip.after is not None and skip.target is not None:
        yield Issue(
            "rollout.skip.after",
            "is set, and so is rollout.skip.target, by which prompts that are settled are rare already",
            remedy="leave one of them out",
        )


def _generated(c: Config) -> Iterator[Issue]:
    """Of data.reasoning_gym, whose files become data.sets and eval.sets."""
    data, tasks = c.data, c.data.reasoning_gym
    key = "data.reasoning_gym"
    if tasks and (other := "train" if data.train is not None else "sets" if data.sets else ""):
        yield Issue(f"data.{other}", f"is set, and so is {key}, which is trained on instead", remedy="leave one out")
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
                f"two sets are called {task.name!r}: metrics would not tell them apart",
                remedy=f"choose another name for this one, with dataset: {task.source}",
            )
        taken.add(task.name)
