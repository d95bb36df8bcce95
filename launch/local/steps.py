"""The order of a run in one process: weights out, RL steps, evaluations where they are due."""

from collections.abc import Callable

from launch.run.job import Job
from launch.run.rl_step import rl_step
from launch.run.train import due


def run_steps(job: Job, evaluate: Callable[[Job], object]) -> None:
    """To the last RL step. `evaluate` is called before the first step, every eval.every steps and after the last.
    Raises Interrupted between steps, and what rl_step raises."""
    config = job.config
    job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
    job.publish()
    evaluate(job)
    while job.steps_done < config.run.steps:
        job.interrupt.check()
        rl_step(job)
        if due(job.steps_done, config.eval.every, config.run.steps):
            evaluate(job)
