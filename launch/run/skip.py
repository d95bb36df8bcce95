"""Whose turn it is: the prompts of the order, without those that `rollout.skip` passes over. Owns no state: that is in
the order and in policies.token_budget.skip."""

from collections.abc import Sequence

from actors.data import PromptOrder, PromptSet
from actors.data.mixture import MixedOrder
from launch.batch import Pick
from launch.run.collect import Round
from launch.run.groups import PromptGroup, given_up
from policies.token_budget.curriculum import Skipping

PASSED_OVER = "skip/passed_over"


def next_picks(
    order: PromptOrder | MixedOrder, prompts: PromptSet, count: int, skip: Skipping | None
) -> tuple[list[Pick], int]:
    """The next `count` picks, and how many prompts were passed over on the way to them.

    Before each at most one whole epoch: a run in which every prompt is settled samples all the same.
    """
    picks: list[Pick] = []
    passed_over = in_a_row = 0
    while len(picks) < count:
        ((epoch, index),) = order.take(1)
        pick = Pick(epoch, prompts[index])
        if skip is not None and in_a_row < len(prompts) and skip.passes_over(epoch, pick.prompt.prompt_id):
            in_a_row += 1
            continue
        passed_over, in_a_row = passed_over + in_a_row, 0
        picks.append(pick)
    return picks, passed_over


def observe(skip: Skipping, groups: Sequence[PromptGroup]) -> None:
    """What became of the picks. A group of which a response was given up settles nothing: nobody knows what it would
    have come to."""
    for group in groups:
        if any(given_up(member) for member in group.graded):
            continue
        skip.observe(group.pick.prompt.prompt_id, [member.grade.value for member in group.graded])


def skip_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """Metrics of an RL step's rounds together; {} without rollout.skip."""
    passed_over = [collected.metrics[PASSED_OVER] for collected in rounds if PASSED_OVER in collected.metrics]
    if not passed_over:
        return {}
    sampled = sum(len(collected.groups) for collected in rounds)
    return {PASSED_OVER: sum(passed_over), "skip/share": sum(passed_over) / max(sum(passed_over) + sampled, 1)}
