"""Held-out evaluation: mean reward of `eval.samples` responses per prompt of data.eval. Changes nothing in the run.

The noise is that of epoch -1 with the run's seed: every evaluation of a run, and a later `paceline eval`, draws with
the same noise, so that differences come from the weights alone.

With low-bit rollouts an evaluation is of what the run samples from, in that precision; `evaluate_masters` has engines
compute with the same weights in model.dtype.
"""

import time
from pathlib import Path

import numpy as np

from actors.data import PromptSet
from actors.engine.capabilities import BACKENDS
from launch.batch import EVAL_EPOCH, Batch, Pick
from launch.cluster.session import ray_session
from launch.cluster.versions import compared
from launch.config import Config
from launch.config.paths import tokenizer_dir
from launch.errors import PacelineError, show
from launch.interrupt import interrupt_flag
from launch.observe import Observer, Sample
from launch.precision import MASTER_REWARD
from launch.run.job import Job, open_job


def evaluate_job(job: Job) -> dict[str, float]:
    """Evaluate the weights that the workers hold; metrics `eval/*`, recorded once per number of steps done.

    eval/reward: mean over prompts of their mean reward; eval/prompt_std: standard deviation of the prompts' means.
    """
    key = str(job.steps_done)
    if job.held_out is None or key in job.evaluations:
        return job.evaluations.get(key, {})
    start_s = time.monotonic()
    metrics, responses = _sampled(job, job.held_out)
    job.evaluations[key] = metrics
    job.observer.samples(job.steps_done, responses, held_out=True)
    job.observer.evaluation(job.steps_done, metrics, time.monotonic() - start_s)
    return metrics


def evaluate_masters(job: Job) -> dict[str, float]:
    """After `evaluate_job` of a run with low-bit rollouts, once: the same evaluation of the same weights in
    model.dtype, as `eval/master_*`. From then on engines hold those: nothing is to be sampled for training before the
    next `Job.publish`. Nothing where rollouts are in full precision, or where the engine keeps its precision."""
    key, options = str(job.steps_done), job.config.rollout
    metrics = job.evaluations.get(key, {})
    if options.quantization == "none" or job.held_out is None or MASTER_REWARD in metrics:
        return metrics
    if not BACKENDS[options.engine.backend].follows_weights:
        job.observer.event(
            "evaluated_in_one_precision",
            f"the {options.engine.backend} engine keeps its precision, {options.quantization}; to evaluate in "
            f"{job.config.model.dtype}: paceline eval --model MODEL with rollout.quantization=none",
        )
        return metrics
    start_s = time.monotonic()
    job.publisher.publish(job.steps_done, masters=True)
    full, _ = _sampled(job, job.held_out)
    added = {name.replace("eval/", "eval/master_"): value for name, value in full.items()}
    job.evaluations[key] = metrics | added
    job.observer.evaluation(job.steps_done, job.evaluations[key], time.monotonic() - start_s)
    return job.evaluations[key]


def _sampled(job: Job, held_out: PromptSet) -> tuple[dict[str, float], list[Sample]]:
    """Metrics and responses of what the workers hold."""
    options = job.config.eval
    picks = [Pick(EVAL_EPOCH, prompt) for prompt in held_out]
    batch = Batch(
        picks,
        [options.samples] * len(picks),
        job.eval_sampling,
        seed=job.config.run.seed,
        expected_tokens=[float(job.eval_sampling.max_new_tokens)] * len(picks),
        stop=job.stop,
    )
    job.memory.decode()
    collected = job.collector.run(batch, "eval")
    means = [float(np.mean([m.grade.value for m in group.graded])) for group in collected.groups if group.graded]
    if not means:
        raise PacelineError("no held-out response could be graded", remedy="see the reward's errors in events.jsonl")
    lengths = [member.rollout.tokens.size for member in collected.members]
    metrics = {
        "eval/reward": float(np.mean(means)),
        "eval/prompt_std": float(np.std(means)),
        "eval/length_mean": float(np.mean(lengths)),
        "eval/failed": float(collected.failed),
    }
    return metrics, [member.sample(group.pick) for group in collected.groups for member in group.members]


def with_model(config: Config, model: str | None) -> Config:
    """`config` with the weights of the directory `model`, and the tokenizer it had; None: with its own weights."""
    if model is None:
        return config
    path = {"path": model, "tokenizer": tokenizer_dir(config)}
    return config.model_copy(update={"model": config.model.model_copy(update=path)})


def evaluate(config: Config) -> dict[str, float]:
    """`paceline eval`: start the actors, evaluate model.path, and end them."""
    if config.data.eval is None:
        raise PacelineError("data.eval is not set: there is nothing to evaluate on", remedy="set data.eval=FILE")
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update={"train": False})})
    run_dir = Path(config.run.dir) / f"{config.run.name}.eval-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        interrupt_flag() as interrupt,
        ray_session(address=config.cluster.address, on_lost=show, lost_after_s=config.cluster.ray_timeout_s) as session,
        Observer(run_dir, config) as observer,
        open_job(
            config,
            observer,
            interrupt,
            Path(config.model.path),
            run_dir,
            versions=compared(session, observer.event),
        ) as job,
    ):
        job.publish()
        evaluate_job(job)
        return evaluate_masters(job)
