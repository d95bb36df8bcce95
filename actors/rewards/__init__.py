"""Rewards: grading of responses. `build(options)` gives a `Grader`; no Ray, no torch."""

from actors.rewards.grader import Grader, build
from actors.rewards.sandbox import describe_confinement
from contracts.rewards import Grade, GradeItem, GradingError, RewardConfigError

__all__ = ["Grade", "GradeItem", "Grader", "GradingError", "RewardConfigError", "build", "describe_confinement"]
