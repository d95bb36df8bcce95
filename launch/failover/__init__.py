"""Recovery of a lost learner rank: the group is made again, restored to its state, and the call is repeated."""

from launch.failover.kept import KeptSteps
from launch.failover.learner import (
    FailoverLearner,
    LearnerEvent,
    LearnerNews,
    WeightsRenewed,
)

__all__ = [
    "FailoverLearner",
    "KeptSteps",
    "LearnerEvent",
    "LearnerNews",
    "WeightsRenewed",
]
