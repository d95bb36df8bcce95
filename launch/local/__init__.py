"""Run one configuration in this process, without Ray (`paceline.train(..., backend="local")`).

The tokens, rewards and losses are those of the run on Ray. For debugging, notebooks and tests.
"""

from launch.local.job import LocalLearner, initial_weights, open_job, threads_of
from launch.local.record import RunRecord, record_run

__all__ = ["LocalLearner", "RunRecord", "initial_weights", "open_job", "record_run", "threads_of"]
