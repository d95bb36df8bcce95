"""The order's next prompts, without those that `rollout.skip` passes over.

Owns no state: the order and policies.token_budget.skip have it.
"""

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
    """Return the next `count` picks, and the number of prompts skipped before them.

    At most one whole epoch is skipped before each pick, so a run with only settled prompts still samples.
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
    """Learn from the picks' rewards. A group with a given-up response settles nothing, since its reward is unknown."""
    for group in groups:
        if any(given_up(member) for member in group.graded):
            continue
        skip.observe(group.pick.prompt.prompt_id, [member.grade.value for member in group.graded])


def skip_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """Return metrics of an RL step's rounds together; {} without rollout.skip."""
    passed_over = [collected.metrics[PASSED_OVER] for collected in rounds if PASSED_OVER in collected.metrics]
    if not passed_over:
        return {}
    sampled = sum(len(collected.groups) for collected in rounds)
    return {PASSED_OVER: sum(passed_over), "skip/share": sum(passed_over) / max(sum(passed_over) + sampled, 1)}
