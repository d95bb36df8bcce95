"""Open a run: make its parts, start all actors at once, and end them with the run.

Owns the order of the starts. launch.run.reactions has everything that happens later.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from actors.data.mixture import make_order
from actors.engine.capabilities import capabilities_of
from actors.engine.process import RolloutEngine, spawn_engine
from actors.environment_worker import EnvironmentPool
from actors.identity import unique_name
from actors.placement import Placement, place
from actors.reward_pool import RewardPool
from actors.rollout_worker import RolloutWorker
from config.model import ModelOptions
from config.rollout import EngineOptions, SamplingOptions
from config.tree import EvalSetOptions
from launch.batch import sampling_params
from launch.calibrations import CalibrationStore
from launch.cluster.address import attaches
from launch.cluster.versions import NodeVersions
from launch.config import Config
from launch.config.bias import biases_of
from launch.config.lookahead import ahead_meanwhile, lookahead_text, no_lookahead, only_apart
from launch.config.memory import adapter_parameters, fitted
from launch.config.paths import tokenizer_dir
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher, WorkerHandle
from launch.drafter.training import DrafterTraining, drafter_training
from launch.failover import FailoverLearner, KeptSteps
from launch.failover.starter import LearnerStarter
from launch.fleet import Autoscaler, Fleet
from launch.fleet.autoscaler import scaled
from launch.fleet.feed import NoticeFeed
from launch.fleet.notices import Notices
from launch.interrupt import Interrupt
from launch.observe import Observer, SpeculationMeter
from launch.precision import precision_text
from launch.run.collect import Collector
from launch.run.deltas import DeltaChoice
from launch.run.episodes import Episodes
from launch.run.inputs import Inputs, load_inputs
from launch.run.job import Job, prompt_skip
from launch.run.lookahead import Lookahead
from launch.run.phases import SharedMemory
from launch.run.publish import Publisher
from launch.run.reactions import Reactions
from launch.run.rounds import round_sampling
from launch.run.token_budget import TokenBudget
from launch.run_folder import log_file
from policies.idle import IdleTime
from policies.lengths import LengthModel
from policies.roofline.pace import Pace

KEPT_DIR = "kept_steps"  # in the run's folder: the learner's inputs since its last checkpoint, during the run


@contextmanager
def open_job(
    config: Config,
    observer: Observer,
    interrupt: Interrupt,
    model_dir: Path,
    run_dir: Path,
    versions: NodeVersions,
    inputs: Inputs | None = None,
    pace: Pace | None = None,
) -> Iterator[Job]:
    """Start every actor at once, and end them all when the block is left.

    `model_dir`: the initial weights (the warm start's result, or model.path). `run_dir`: the run's folder. `versions`:
    of the cluster's nodes. `inputs`: default: loaded here. `pace`: of experiments (see policies.roofline.pace). Raises
    ConfigError for what fits none of the cluster's GPUs.
    """
    config, note = fitted_to_cluster(config)
    context = RunContext(
        config=config,
        observer=observer,
        interrupt=interrupt,
        run_dir=run_dir,
        log=partial(log_file, run_dir),
        pace=pace,
    )
    model = config.model.model_copy(update={"path": str(model_dir), "tokenizer": tokenizer_dir(config)})
    inputs = inputs or load_inputs(config)
    announce(context, inputs, note)
    meter = SpeculationMeter() if config.speculation.mode != "off" else None
    with ExitStack() as stack:
        start_timeout_s = config.cluster.start_timeout_s
        placement = stack.enter_context(place(config, versions.refused, context))
        rewards = stack.enter_context(
            RewardPool(config.reward, context, actor_options=versions.off_unvouched, start_timeout_s=start_timeout_s)
        )
        learner = stack.enter_context(
            FailoverLearner(LearnerStarter(context, model, placement, versions), KeptSteps(run_dir / KEPT_DIR), context)
        )
        calibrations = stack.enter_context(kept_calibrations(context))
        drafter = stack.enter_context(drafter_training(config, observer, run_dir, model, versions.refused, pace))
        engines = engine_start(config, model, calibrations, pace)
        dispatcher = RolloutDispatcher(
            PlacedWorkers(engines, placement, drafter, context),
            config.rollout,
            context,
            start_timeout_s=start_timeout_s,
            refused=versions.refused,
            ahead_meanwhile=ahead_meanwhile(config),
            ahead_apart=only_apart(config),
        )
        stack.callback(dispatcher.close)
        environments = episodes = None
        if config.environment is not None:
            environments = stack.enter_context(
                EnvironmentPool(config.environment, context, actor_options=versions.off_unvouched)
            )
            episodes = Episodes(config.environment, environments, inputs.template)
        autoscaler = Autoscaler(placement.plan, there=scaled())
        fleet = Fleet(dispatcher, placement, learner, versions, drafter, autoscaler, context)
        stack.callback(fleet.close)
        notices = stack.enter_context(listening(context, fleet, learner, rewards, drafter))
        job = Job(
            context=context,
            tokenizer=inputs.tokenizer,
            prompts=inputs.prompts,
            held_out=inputs.held_out,
            sampling=sampling_params(config.rollout.sampling, inputs.stop_tokens),
            stop=inputs.stop,
            order=make_order(inputs.prompts, config.run.seed, config.data.shuffle),
            lengths=LengthModel(config.rollout.sampling.max_new_tokens / 2),
            budget=TokenBudget(config, inputs.stop, inputs.answer),
            skip=prompt_skip(config, inputs.prompts),
            rounds=round_sampling(config, inputs.prompts),
            learner=learner,
            dispatcher=dispatcher,
            publisher=Publisher(
                learner, dispatcher, context, DeltaChoice(config.cluster.weights_delta, context.observer)
            ),
            memory=SharedMemory(learner, dispatcher, context),
            collector=Collector(
                context,
                dispatcher,
                rewards,
                inputs.tokenizer,
                share=meter is not None,
                fleet=fleet,
                episodes=episodes,
                drafter=drafter,
            ),
            fleet=fleet,
            notices=notices,
            speculation=meter,
            drafter=drafter,
        )
        if no_lookahead(config) is None:
            job.lookahead = Lookahead(
                early=dispatcher.early,
                config=config,
                prompts=job.prompts,
                sampling=job.sampling,
                stop=job.stop,
                idle=IdleTime() if drafter is not None else None,
            )
        reactions = Reactions(job, fleet, rewards, environments, versions, calibrations)
        context.loop.react_with(reactions)
        learner.start()
        if drafter is not None:
            drafter.record_from(learner)
        fleet.start()
        reactions.started()
        yield job


@dataclass(frozen=True, slots=True)
class PlacedWorkers:
    """The workers of a run, on its reservation (WorkerStarts)."""

    make: Callable[..., RolloutEngine]
    placement: Placement
    drafter: DrafterTraining | None
    context: RunContext

    def spawn(self, name: str) -> WorkerHandle:
        engine, log = partial(self.make, name=name), self.context.log(name)
        training = None if self.drafter is None else self.drafter.plan(name, engine_options(self.context.config))
        options = {"num_cpus": 0, **self.placement.worker_options(name), "name": unique_name(name)}
        worker = ray.remote(RolloutWorker).options(**options)
        return worker.remote(name, engine, training, log, self.placement.gpus_timeout_s)

    def placed(self, name: str) -> bool:
        return self.placement.there(name)


@contextmanager
def kept_calibrations(context: RunContext) -> Iterator[CalibrationStore]:
    """What workers measure is written when the run ends."""
    calibrations = CalibrationStore.of(context.config, context.observer)
    try:
        yield calibrations
    finally:
        calibrations.write()


@contextmanager
def listening(
    context: RunContext, fleet: Fleet, learner: FailoverLearner, rewards: RewardPool, drafter: DrafterTraining | None
) -> Iterator[Notices | None]:
    """Watch for notices about nodes, if there may be any."""
    if not listens(context.config):
        yield None
        return
    here = str(ray.get_runtime_context().get_node_id())
    feed = NoticeFeed(context.config.cluster.spot, here, context)
    try:
        yield Notices(feed, fleet, learner, rewards, drafter, context, here=here)
    finally:
        feed.close()


def fitted_to_cluster(config: Config) -> tuple[Config, str]:
    """Return the configuration fitted to the cluster's GPUs, and a note about it."""
    if config.cluster.layout == "embedded":
        return config, ""
    return fitted(config, ray.nodes())  # type: ignore[no-untyped-call]


def announce(context: RunContext, inputs: Inputs, note: str) -> None:
    """Report facts that are useful before the run begins."""
    config, event, prompts = context.config, context.observer.event, inputs.prompts
    for part in prompts.sets:
        event("data", f"data.sets, {part.name}: {part.report.summary()}")
    if len(prompts) and not prompts.sets:
        event("data", f"data.train: {prompts.report.summary()}")
    for held in inputs.held_out:
        event("data", f"held out, {held.name}: {held.prompts.report.summary()}")
    if (reason := not_repeatable(config)) is not None:
        event("not_repeatable", reason)
    if note:
        event("self_drafter", note)
    if config.rollout.lookahead != "off":
        event("lookahead", lookahead_text(config))
    if config.engine_ranks > 1:
        event(
            "ranks",
            f"each engine's model is spread over {config.engine_ranks} ranks, whose sums are added in their order: its "
            "log-probs agree with the learner's to rounding, and another number of ranks samples other tokens",
        )
    for reason in biases_of(config):
        event("biased", reason)
    if config.rollout.quantization != "none":
        precision = precision_text(config.rollout.quantization, config.learner.quantization, config.model.dtype)
        event("precision", precision)
    trained = adapter_parameters(config) if len(prompts) else None  # an evaluation trains none
    if trained is not None:
        engine_merges = capabilities_of(config).adapters
        handed = "are handed over" if engine_merges else "are merged before they are handed over"
        event("lora", f"{trained:,} parameters of adapters are trained and {handed}")


def listens(config: Config) -> bool:
    """Whether to watch for notices about nodes: on an existing cluster, or if a cloud is named. A run's own head, as on
    a laptop, has no one to drain it, and most likely no cloud."""
    return attaches(config.cluster.address) or config.cluster.spot.provider not in ("auto", "none")


def not_repeatable(config: Config) -> str | None:
    """Return why two runs of this configuration, or a resumed one, may sample or learn differently. None if they do
    not, given model.batch_invariant."""
    backend = config.rollout.engine.backend
    if capabilities_of(config).batch_invariant:
        judges = [term.label for term in config.reward.terms if term.kind == "judge"]
        said = "is an endpoint's, whose replies need not be the same twice: two runs need not learn the same"
        return f"the reward term {judges[0]} {said}" if judges else None
    return (
        f"with the {backend} engine tokens depend on what is decoded together and on who decodes it: a request that "
        "goes to another worker keeps the tokens that were reported and goes on with other noise, and a resumed run "
        "samples other tokens than one that was not interrupted; their distribution is the same (docs/vllm.md)"
    )


def engine_options(config: Config) -> EngineOptions:
    """Return rollout.engine with ranks and threads decided: the ranks of an embedded run's engines share this machine's
    cores evenly."""
    ranks = config.engine_ranks
    engine = config.rollout.engine.model_copy(update={"tensor_parallel": ranks})
    if engine.threads is not None or config.cluster.layout != "embedded":
        return engine
    return engine.model_copy(update={"threads": max(1, (os.cpu_count() or 1) // (config.rollout.workers.max * ranks))})


def engine_start(
    config: Config,
    model: ModelOptions,
    calibrations: CalibrationStore | None = None,
    pace: Pace | None = None,
) -> "partial[RolloutEngine]":
    """Return what makes a worker's engine, given its name. `model`: with the run's initial weights."""
    recording = config.drafter.recording
    recorded = config.drafter.train and recording.source == "engine"
    drawn: list[SamplingOptions | EvalSetOptions] = [config.rollout.sampling, *config.eval_sets.values()]
    return partial(
        spawn_engine,
        model,
        engine_options(config),
        seed=config.run.seed,
        start_timeout_s=config.cluster.start_timeout_s,
        speculation=config.speculation,
        recording_bytes=recording.max_bytes_per_step if recorded else 0,
        quantization=config.rollout.quantization,
        lora=config.learner.lora,
        calibrations=() if calibrations is None else calibrations.given,
        calibration_path="" if calibrations is None else calibrations.path,
        truncated=any(one.top_k or (one.top_p or 1.0) < 1 for one in drawn),
        pace=pace,
    )
