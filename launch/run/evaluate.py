"""Held-out evaluation: `eval.samples` responses per prompt of data.eval, or of eval.sets. Changes nothing in the run.

The noise is that of epoch -1 with the run's seed. Every evaluation of a run, and a later `paceline eval`, draws the
same noise, so that differences come from the weights alone.

With low-bit rollouts an evaluation measures what the run samples from, in that precision. `evaluate_masters` has
engines compute with the same weights in model.dtype.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from actors.engine.capabilities import capabilities_of
from launch.batch import EVAL_EPOCH, Batch, Pick
from launch.cluster.session import RaySession, ray_session
from launch.cluster.versions import compared
from launch.config import Config
from launch.errors import PacelineError, show
from launch.interrupt import Interrupt, interrupt_flag
from launch.observe import Observer
from launch.precision import MASTER_REWARD
from launch.reward_functions import code_paths
from launch.run.inputs import load_inputs
from launch.run.job import Job
from launch.run.measures import Metrics, by_prompt, named, set_metrics
from launch.run.opening import open_job


def evaluate_job(job: Job, *, printed: bool = True) -> dict[str, float]:
    """Evaluate the weights that the workers hold. Returns metrics `eval/*` (launch.run.measures), recorded once per
    number of steps done. `printed`: see Observer.evaluation."""
    key = str(job.steps_done)
    if not job.held_out or key in job.evaluations:
        return job.evaluations.get(key, {})
    start_s = time.monotonic()
    job.evaluations[key] = metrics = _sampled(job)
    job.observer.evaluation(job.steps_done, metrics, time.monotonic() - start_s, printed=printed)
    return metrics


def evaluate_masters(job: Job, *, printed: bool = True) -> dict[str, float]:
    """After `evaluate_job` of a run with low-bit rollouts, repeat the evaluation with the same weights in model.dtype,
    as `eval/master_*`. Done once. Engines hold those weights afterwards, so sample nothing for training before the next
    `Job.publish`. Does nothing if rollouts are in full precision, or if the engine keeps its precision."""
    key, options = str(job.steps_done), job.config.rollout
    metrics = job.evaluations.get(key, {})
    if options.quantization == "none" or not job.held_out or MASTER_REWARD in metrics:
        return metrics
    if not capabilities_of(job.config).follows_weights:
        job.observer.event(
            "evaluated_in_one_precision",
            f"the {options.engine.backend} engine keeps its precision, {options.quantization}; to evaluate in "
            f"{job.config.model.dtype}: paceline eval RUN rollout.quantization=none",
        )
        return metrics
    start_s = time.monotonic()
    job.publisher.publish(job.steps_done, masters=True)
    full = _sampled(job, told=False)
    added = {name.replace("eval/", "eval/master_"): value for name, value in full.items()}
    job.evaluations[key] = metrics | added
    job.observer.evaluation(job.steps_done, job.evaluations[key], time.monotonic() - start_s, printed=printed)
    return job.evaluations[key]


def _sampled(job: Job, *, told: bool = True) -> dict[str, float]:
    """Return metrics of the weights that workers hold. All sets are sampled at once, so that there is one tail. `told`:
    pass the observer the responses, and how often each prompt was solved."""
    counts = [held.samples for held in job.held_out for _ in held.prompts]
    sampling = [held.sampling for held in job.held_out for _ in held.prompts]
    batch = Batch(
        [Pick(EVAL_EPOCH - index, prompt) for index, held in enumerate(job.held_out) for prompt in held.prompts],
        counts,
        sampling,
        seed=job.config.run.seed,
        expected_tokens=[float(params.max_new_tokens) for params in sampling],
        stop=job.stop,
    )
    job.memory.decode()
    collected = job.collector.run(batch, "eval", step=job.steps_done)
    measured = dict[str, Metrics]()
    first = 0
    for held in job.held_out:
        groups = collected.groups[first : first + len(held.prompts)]
        first += len(held.prompts)
        ks = job.config.eval.at or sorted({1, held.samples})
        measured[held.name] = set_metrics(groups, ks, job.config.reward)
        if told:
            responses = [
                member.sample(group.pick, held.name, batch.place(member.rollout.request_id)[1])
                for group in groups
                for member in group.members
            ]
            job.observer.samples(job.steps_done, responses, held_out=True)
            job.observer.judged(job.steps_done, by_prompt(groups, held.name, job.config.reward))
        if not measured[held.name]:
            raise PacelineError(
                f"no response to the held-out set {held.name} could be graded",
                remedy="see the reward's errors in events.jsonl",
            )
    metrics = named(measured, alone=not job.config.eval.sets)
    return metrics | {"eval/failed": float(collected.failed)}


def evaluate(config: Config) -> tuple[dict[str, float], Path]:
    """`paceline eval`: start the actors, evaluate model.path, and end them. Returns the metrics, and the folder with
    the responses."""
    ((metrics, folder),) = evaluate_each([config])
    return metrics, folder


def evaluate_each(configs: Sequence[Config]) -> list[tuple[dict[str, float], Path]]:
    """Evaluate several configurations that differ in model and name, one after the other on one start of Ray."""
    for config in configs:
        if not config.eval_sets:
            raise PacelineError("there is nothing to evaluate on", remedy="set data.eval=FILE, or eval.sets")
    with (
        interrupt_flag() as interrupt,
        ray_session(
            address=configs[0].cluster.address,
            on_lost=show,
            lost_after_s=configs[0].cluster.ray_timeout_s,
            code_paths=code_paths(configs[0]),
        ) as session,
    ):
        return [_evaluated(config, interrupt, session) for config in configs]


def _evaluated(config: Config, interrupt: Interrupt, session: RaySession) -> tuple[dict[str, float], Path]:
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update={"train": False})})
    run_dir = Path(config.run.dir) / f"{config.run.name}.eval-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        Observer(run_dir, config) as observer,
        open_job(
            config,
            observer,
            interrupt,
            Path(config.model.path),
            run_dir,
            inputs=load_inputs(config, training=False),
            versions=compared(session, observer),
        ) as job,
    ):
        job.publish()
        evaluate_job(job, printed=False)
        metrics = evaluate_masters(job, printed=False)
        observer.event("finished", f"evaluated; responses in {run_dir}")
        return metrics, run_dir
