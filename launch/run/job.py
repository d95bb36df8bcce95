"""What lives as long as a run: data, learner group, rollout workers, reward workers. Owns their start, their end and
the state that a checkpoint holds; the steps themselves are elsewhere.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.data import PromptOrder, PromptSet
from actors.data.mixture import MixedOrder, make_order
from actors.data.tokenizers import Tokenizer
from actors.engine.capabilities import BACKENDS
from actors.engine.core import RolloutEngine
from actors.engine.process import spawn_engine
from actors.environment_worker import EnvironmentPool
from actors.learner_group import LearnerGroup
from actors.placement import Placement, off, place
from actors.reward_pool import RewardPool
from config.model import ModelOptions
from config.rollout import EngineOptions
from contracts.rollout import EngineWindow, SamplingParams, StopRule
from launch.batch import sampling_params
from launch.calibrations import CalibrationStore
from launch.cluster.session import attaches
from launch.cluster.versions import NodeVersions
from launch.config import Config
from launch.config.bias import biases_of
from launch.config.memory import adapter_parameters, fitted
from launch.config.paths import tokenizer_dir
from launch.dispatch import NoWorkersError, RolloutDispatcher, spawner
from launch.drafter.training import DrafterTraining, drafter_training
from launch.failover import FailoverLearner, KeptSteps
from launch.fleet import Autoscaler, Fleet
from launch.fleet.feed import Feed
from launch.fleet.notices import Notices
from launch.interrupt import Interrupt
from launch.observe import Observer, Span, SpeculationMeter
from launch.precision import precision_text
from launch.run.ahead import Responses
from launch.run.collect import Collector, Round
from launch.run.episodes import Player
from launch.run.inputs import HeldOut, Inputs, load_inputs
from launch.run.partial import Carried
from launch.run.phases import SharedMemory
from launch.run.publish import Published, Publisher
from launch.run.token_budget import TokenBudget
from launch.run_folder import log_file
from policies.lengths import LengthModel
from policies.token_budget.curriculum import PromptCurriculum
from policies.token_budget.skip import PromptSkip, Skipping

KEPT_DIR = "kept_steps"  # in the run's folder: what the learner was given since its last checkpoint, while it runs


@dataclass(kw_only=True)
class Job:
    """The parts of one run. `steps_done` counts complete RL steps and is the version of the current weights."""

    config: Config
    observer: Observer
    interrupt: Interrupt
    tokenizer: Tokenizer
    prompts: PromptSet
    held_out: tuple[HeldOut, ...]
    sampling: SamplingParams
    stop: StopRule | None  # of every response
    order: PromptOrder | MixedOrder
    lengths: LengthModel
    budget: TokenBudget
    learner: FailoverLearner
    dispatcher: RolloutDispatcher
    publisher: Publisher
    memory: SharedMemory
    collector: Collector
    fleet: Fleet | None = None  # None: nobody comes or goes
    notices: Notices | None = None  # None: nobody listens
    skip: Skipping | None = None  # None: no prompt is passed over
    speculation: SpeculationMeter | None = None  # None: it is off
    drafter: DrafterTraining | None = None  # None: no drafter is trained
    steps_done: int = 0
    ahead: list[Round] | None = None  # the next step's responses, where those are sampled while this one is learned
    carried: list[Carried] = field(default_factory=list)  # by rollout.partial, into the next sampling
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # by steps done
    boundary: dict[str, Any] | None = None  # state after the last complete step; None while the learner is past it

    @property
    def sampled_step(self) -> int:
        """The last RL step whose responses were sampled."""
        return self.steps_done + (self.ahead is not None)

    def publish(self) -> Published:
        """Hand the learner's weights to every rollout worker; returns when all have answered for them."""
        if self.drafter is not None:
            self.drafter.reached("publishing", self.sampled_step)
            self.dispatcher.settle()  # what trainers have made is fetched while the target's weights are on their way
        published = self.publisher.publish(self.steps_done)
        if self.drafter is not None:
            self.drafter.hand_out(self.dispatcher, self.steps_done)
        return published

    def span(self, kind: str) -> AbstractContextManager[None]:
        """What the learner does inside the block, for the timeline."""
        return learner_span(self.observer, kind)

    def state_dict(self) -> dict[str, Any]:
        """The driver's side of a checkpoint, JSON but for `ahead`, which gets a file of its own (launch.run.ahead)."""
        return {
            "steps_done": self.steps_done,
            "ahead": Responses(self.ahead, self.carried),
            "order": self.order.state_dict(),
            "lengths": self.lengths.state_dict(),
            "token_budget": self.budget.state_dict(),
            "skip": self.skip.state_dict() if self.skip is not None else None,
            "evaluations": self.evaluations,
            "drafter": self.drafter.state_dict() if self.drafter is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done = int(state["steps_done"])
        responses: Responses = state.get("ahead") or Responses()
        self.ahead, self.carried = responses.ahead, responses.carried
        self.order.load_state_dict(state["order"])
        self.lengths.load_state_dict(state["lengths"])
        self.budget.load_state_dict(state.get("token_budget", {}))
        if self.skip is not None:
            self.skip.load_state_dict(state.get("skip") or {})
        self.evaluations = dict(state["evaluations"])
        if self.drafter is not None and state.get("drafter") is not None:
            self.drafter.load_state_dict(state["drafter"])


@contextmanager
def learner_span(observer: Observer, kind: str) -> Iterator[None]:
    """See Job.span."""
    begin_s, step = time.time(), observer.current_step
    yield
    observer.span(Span("learner", kind, begin_s, time.time(), step))


@contextmanager
def open_job(
    config: Config,
    observer: Observer,
    interrupt: Interrupt,
    model_dir: Path,
    run_dir: Path,
    inputs: Inputs | None = None,
    versions: NodeVersions | None = None,
) -> Iterator[Job]:
    """Start every actor at once, and end them all when the block is left.

    `model_dir`: the initial weights (the warm start's result, or model.path). `run_dir`: the run's folder.
    `inputs`: default: loaded here. `versions`: of the cluster's nodes; default: nobody is asked. Raises ConfigError for
    what fits none of the cluster's GPUs.
    """
    note = ""
    if config.cluster.layout != "embedded":
        config, note = fitted(config, ray.nodes())  # type: ignore[no-untyped-call]
    model = config.model.model_copy(update={"path": str(model_dir), "tokenizer": tokenizer_dir(config)})
    engine = engine_options(config)
    inputs = inputs or load_inputs(config)
    tokenizer, prompts = inputs.tokenizer, inputs.prompts
    for part in prompts.sets:
        observer.event("data", f"data.sets, {part.name}: {part.report.summary()}")
    if len(prompts) and not prompts.sets:
        observer.event("data", f"data.train: {prompts.report.summary()}")
    for held in inputs.held_out:
        observer.event("data", f"held out, {held.name}: {held.prompts.report.summary()}")
    if (reason := not_repeatable(config)) is not None:
        observer.event("not_repeatable", reason)
    if note:
        observer.event("self_drafter", note)
    for reason in biases_of(config):
        observer.event("biased", reason)
    if config.rollout.quantization != "none":
        precision = precision_text(config.rollout.quantization, config.learner.quantization, config.model.dtype)
        observer.event("precision", precision)
    if (trained := adapter_parameters(config)) is not None:
        engine_merges = BACKENDS[config.rollout.engine.backend].adapters
        handed = "are handed over" if engine_merges else "are merged before they are handed over"
        observer.event("lora", f"{trained:,} parameters of adapters are trained and {handed}")
    log = partial(log_file, run_dir)
    with ExitStack() as stack:
        avoid = versions.refused if versions is not None else {}
        unvouched = versions.unvouched if versions is not None else set[str]

        def off_unvouched() -> dict[str, Any]:
            """Ray's options of workers that nothing but their code ties to a node."""
            return {"label_selector": selector} if (selector := off(unvouched())) else {}

        placement: Placement = stack.enter_context(place(config, avoid))
        rewards = stack.enter_context(
            RewardPool(
                config.reward,
                actor_options=off_unvouched,
                start_timeout_s=config.cluster.start_timeout_s,
                on_event=observer.event,
                on_span=partial(_record_span, observer),
                log=log,
            )
        )

        def start_learner(waiting: Callable[[float], None]) -> LearnerGroup:
            placement.learners_off(unvouched())
            return LearnerGroup(
                model,
                config.learner,
                config.objective,
                temperature=config.rollout.sampling.temperature,
                seed=config.run.seed,
                quantization=config.rollout.quantization,
                adapters_only=BACKENDS[config.rollout.engine.backend].adapters,
                actor_options=placement.learner_options,
                start_timeout_s=config.cluster.start_timeout_s,
                waiting=waiting,
                log=log,
            )

        learner = stack.enter_context(
            FailoverLearner(
                start_learner,
                KeptSteps(run_dir / KEPT_DIR),
                max_restarts=config.learner.max_restarts,
                on_event=observer.event,
                progress=observer.progress,
                missing=placement.missing_learner,
                stop=interrupt.check,
            )
        )

        def startable() -> bool:
            """Where they share GPUs, an engine that starts would want the memory of a learner that works."""
            return config.cluster.layout != "colocated" or not learner.busy or fleet.held_back

        meter = SpeculationMeter() if config.speculation.mode != "off" else None
        calibrations = CalibrationStore.of(config, observer.event)
        stack.callback(calibrations.write)
        spawn = engine_start(config, model, calibrations)
        drafter = stack.enter_context(drafter_training(config, observer, run_dir, model, avoid))
        if drafter is not None:
            drafter.record_from(learner)
        dispatcher = RolloutDispatcher(
            spawner(
                lambda name: placement.engine_factory(partial(spawn, name=name)),
                placement.worker_options,
                lambda name: drafter.plan(name, engine) if drafter is not None else None,
                log,
            ),
            config.rollout,
            start_timeout_s=config.cluster.start_timeout_s,
            on_event=partial(_worker_event, observer, drafter),
            on_span=partial(_record_span, observer),
            on_window=lambda worker, window: _window(observer, meter, drafter, fleet, worker, window),
            on_passes=calibrations.heard,
            on_spot=drafter.event if drafter is not None else lambda worker, event: None,
            on_weights=drafter.published if drafter is not None else lambda worker, weights: None,
            on_weights_gone=lambda: memory.renew(),
            placed=placement.there,
            refused=lambda node_id: avoid.get(node_id, ""),
        )
        stack.callback(dispatcher.close)
        if drafter is not None:
            dispatcher.drafters.buffer_of = drafter.buffer_of
        player = None
        if config.environment is not None:
            environments = EnvironmentPool(
                config.environment,
                wake=dispatcher.wake,
                actor_options=off_unvouched,
                on_event=observer.event,
                log=log,
            )
            stack.enter_context(environments)
            player = Player(config.environment, environments, inputs.template)
        more = int(bool(inputs.held_out) or config.objective.dynamic_sampling.max_rounds > 1)  # than one a step
        fleet = Fleet(
            config.rollout.workers,
            dispatcher,
            placement,
            slots=config.rollout.engine.max_running,
            on_event=observer.event,
            rollouts_left=lambda: config.run.steps - observer.current_step + 1 + more - config.rollout.staleness,
            training=lambda: drafter is not None and drafter.trains,
            autoscaler=Autoscaler(placement.plan),
            vouched=versions.vouched if versions is not None else None,
            startable=startable,
        )
        stack.callback(fleet.close)
        fleet.start()
        memory = SharedMemory(config, learner, dispatcher, observer.event)
        learner.make_room, learner.renewed = memory.learn, dispatcher.renew_weights
        learner.hold_back, learner.make_way = fleet.hold_back, fleet.make_way
        notices = None
        if listens(config):
            here = str(ray.get_runtime_context().get_node_id())
            feed = Feed(config.cluster.spot, here, log)
            stack.callback(feed.close)
            notices = Notices(
                feed,
                fleet,
                here=here,
                learners=lambda: learner.nodes,
                training=drafter,
                others=lambda: rewards.nodes,
                on_event=observer.event,
            )
        ticks: list[Callable[[], None]] = [fleet.tick] if notices is None else [notices.tick, fleet.tick]
        if versions is not None:
            for node_id, reason in avoid.items():
                fleet.drain(node_id, reason)
            versions.on_refused, versions.on_gone = fleet.drain, fleet.forget
            ticks.insert(0, versions.look)
        ticks.append(memory.look)
        ticks.append(lambda: observer.fleet(lambda: fleet.state.counts()))
        dispatcher.meanwhile = partial(_each, ticks)
        learner.meanwhile = rewards.meanwhile = partial(_meanwhile, dispatcher, ticks, startable)
        sampling = sampling_params(config.rollout.sampling, inputs.stop_tokens)
        lengths = LengthModel(config.rollout.sampling.max_new_tokens / 2)
        yield Job(
            config=config,
            observer=observer,
            interrupt=interrupt,
            tokenizer=tokenizer,
            prompts=prompts,
            held_out=inputs.held_out,
            sampling=sampling,
            stop=inputs.stop,
            order=make_order(prompts, config.run.seed, config.data.shuffle),
            lengths=lengths,
            budget=TokenBudget(config, inputs.stop, inputs.answer),
            skip=prompt_skip(config, prompts),
            learner=learner,
            dispatcher=dispatcher,
            publisher=Publisher(
                learner, dispatcher, config, on_event=observer.event, span=partial(learner_span, observer)
            ),
            memory=memory,
            collector=Collector(
                dispatcher,
                rewards,
                tokenizer,
                observer,
                interrupt,
                share=meter is not None,
                fleet=fleet,
                player=player,
            ),
            fleet=fleet,
            notices=notices,
            speculation=meter,
            drafter=drafter,
        )


def listens(config: Config) -> bool:
    """Whether notices about nodes are listened to: on a cluster that was there before, or where a cloud is named. A
    head of the run's own, as on a laptop, has nobody who would drain it, and most likely no cloud."""
    return attaches(config.cluster.address) or config.cluster.spot.provider not in ("auto", "none")


def prompt_skip(config: Config, prompts: PromptSet) -> Skipping | None:
    """See Job.skip."""
    options, seed = config.rollout.skip, config.run.seed
    if options.target is not None:
        known = {prompt.prompt_id: prompt.success for prompt in prompts if prompt.success is not None}
        return PromptCurriculum(options, seed, right_from=config.reward.right_from, known=known)
    return PromptSkip(options, seed) if options.after is not None else None


def not_repeatable(config: Config) -> str | None:
    """Why two runs of this configuration, or one that is resumed, need not sample or learn the same; None: they do,
    where model.batch_invariant holds."""
    backend = config.rollout.engine.backend
    if BACKENDS[backend].batch_invariant:
        judges = [term.label for term in config.reward.terms if term.kind == "judge"]
        said = "is an endpoint's, whose replies need not be the same twice: two runs need not learn the same"
        return f"the reward term {judges[0]} {said}" if judges else None
    return (
        f"with the {backend} engine tokens depend on what is decoded together and on who decodes it: a request that "
        "goes to another worker keeps the tokens that were reported and goes on with other noise, and a resumed run "
        "samples other tokens than one that was not interrupted; their distribution is the same (docs/howto/vllm.md)"
    )


def engine_options(config: Config) -> EngineOptions:
    """rollout.engine with its threads decided: an embedded run's engines share this machine's cores evenly."""
    engine = config.rollout.engine
    if engine.threads is not None or config.cluster.layout != "embedded":
        return engine
    return engine.model_copy(update={"threads": max(1, (os.cpu_count() or 1) // config.rollout.workers.max)})


def engine_start(
    config: Config, model: ModelOptions, calibrations: CalibrationStore | None = None
) -> "partial[RolloutEngine]":
    """What makes a worker's engine, but for its name. `model`: with the weights that the run begins with."""
    recording = config.drafter.recording
    recorded = config.drafter.train and recording.source == "engine"
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
    )


def _meanwhile(
    dispatcher: RolloutDispatcher, parts: Sequence[Callable[[], None]], startable: Callable[[], bool]
) -> None:
    """While the driver waits for others than workers: notices are heard, workers come, go and are replaced."""
    _each(parts)
    if startable():
        with suppress(NoWorkersError):  # whoever needs a worker next says it
            dispatcher.settle()


def _each(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _record_span(observer: Observer, actor: str, kind: str, start_s: float, end_s: float) -> None:
    observer.span(Span(actor, kind, start_s, end_s, observer.current_step))


def _worker_event(observer: Observer, drafter: DrafterTraining | None, kind: str, message: str) -> None:
    """What the dispatcher says, which also is what a worker does now: one that is away reports nothing itself."""
    observer.event(kind, message)
    if kind == "worker_left" and drafter is not None:
        drafter.left(message.partition(": ")[0])
    states = {
        "worker_joined": "idle",
        "worker_left": "left",
        "worker_lost": "restart",
        "worker_restarted": "idle",
        "worker_dead": "lost",
    }
    if kind in states:
        name, _, detail = message.partition(": ")
        observer.worker(name, states[kind], detail)
        observer.load(name, running=0, waiting=0, kv_tokens=0)


def _window(
    observer: Observer,
    meter: SpeculationMeter | None,
    drafter: DrafterTraining | None,
    fleet: Fleet,
    worker: str,
    window: EngineWindow,
) -> None:
    fleet.window(window)
    if drafter is not None:
        drafter.window(window)
    detail = f"{window.running} running, {window.waiting} waiting"
    if meter is not None:
        if not window.evaluation:
            meter.window(worker, window)
        if window.running and window.strategies:
            detail += f", {max(window.strategies, key=lambda use: use.engine_steps).strategy}"
    observer.worker(worker, "decode" if window.running else "idle", detail)
    observer.load(worker, running=window.running, waiting=window.waiting, kv_tokens=window.kv_tokens_used)
