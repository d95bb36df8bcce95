"""A lost learner rank does not end the run: the group is made again, brought to where it was, and asked again."""

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
