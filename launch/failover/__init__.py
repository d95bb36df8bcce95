"""A lost learner rank does not end the run: the group is made again, brought to where it was, and asked again."""

from launch.failover.kept import KeptSteps
from launch.failover.learner import FailoverLearner

__all__ = ["FailoverLearner", "KeptSteps"]
