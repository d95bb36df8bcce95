"""The order of a run in one process: weights out, RL steps, evaluations when due."""

from collections.abc import Iterator

from launch.run.job import Job
from launch.run.rl_step import rl_step
from launch.run.train import due


def run_steps(job: Job) -> Iterator[int]:
    """To the last RL step. Yields, with the steps done, where the run is to be evaluated: before the first step, every
    eval.every steps and after the last. Raises Interrupted between steps, and what rl_step raises."""
    config = job.config
    job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
    job.publish()
    yield job.steps_done
    while job.steps_done < config.run.steps:
        job.interrupt.check()
        rl_step(job)
        if due(job.steps_done, config.eval.every, config.run.steps):
            yield job.steps_done
