"""Which groups of a round the learner gets."""

import numpy as np
import pytest

from actors.data import Prompt
from actors.engine.types import FinishReason, Rollout, Sampled
from actors.rewards.types import Grade
from launch.run.batch import Pick
from launch.run.groups import Graded, Group, training_sequences
from policies.options import ObjectiveOptions


def groups_of(*rewards: list[float]) -> list[Group]:
    """One group for each list of rewards."""
    groups, ids = [], iter(range(100))
    for index, values in enumerate(rewards):
        members = []
        for value in values:
            one = np.zeros(1, np.float32)
            rollout = Rollout(
                request_id=next(ids),
                sampled=Sampled(np.array([5], np.int32), one, one),
                finish_reason=FinishReason.STOP,
                weights_version=0,
                started_s=0.0,
                finished_s=1.0,
            )
            members.append(Graded(rollout=rollout, grade=Grade(value=value), text=""))
        prompt = Prompt(prompt_id=index, uid=str(index), text="p", tokens=np.array([1, 2], np.int32), record={})
        groups.append(Group(Pick(0, prompt), members))
    return groups


@pytest.mark.parametrize(
    ("objective", "used"),
    [
        (ObjectiveOptions(), 1),
        (ObjectiveOptions(kl="k3", kl_coef=0.0), 1),  # only measured: no gradient
        (ObjectiveOptions(kl="k3", kl_coef=0.1), 2),
        (ObjectiveOptions(drop_zero_variance=False), 2),
    ],
)
def test_a_group_of_equal_rewards_is_kept_where_its_loss_has_a_gradient(objective: ObjectiveOptions, used: int) -> None:
    sequences, metrics = training_sequences(groups_of([1.0, 0.0], [1.0, 1.0]), objective)
    assert metrics["groups/used"] == used
    assert metrics["groups/zero_variance"] == 1
    assert [s.advantage for s in sequences[2:]] == [0.0, 0.0][: 2 * (used - 1)]
