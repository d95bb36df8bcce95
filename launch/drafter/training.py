"""The driver's side of drafter training: the coordinator, the data buffers, and the weights that engines draft with.

Owns the decisions between two rollouts: whether to train in the next tail, and whether to hand out or roll back
weights. Also owns their messages. It never waits for a worker, a trainer or the coordinator while requests run. A
failure here never fails the run, since drafts only save time.
"""

import json
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never

import ray
from ray.exceptions import RayError

from actors.spot.process import spawn_trainer
from actors.spot_host import DrafterEvent, RecordingReport, SpotPlan
from config.catalogue import FRESH_WEIGHTS, TRAINED
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.strategy import Strategy
from contracts.rollout import DrafterFailed, DrafterLoaded, EngineWindow
from contracts.spot import Checkpointed, MicroStep, TrainFailed, TrainStopped
from contracts.training import StepResult
from coordinator.transport.client import DriverClient
from drafter.published import is_published, read_published
from launch.config import Config
from launch.dispatch import RolloutDispatcher, Weights
from launch.drafter.actors import DrafterActors, drafter_actors
from launch.drafter.watch import DrafterWatch
from launch.drafter.weights import load_weights, save_weights
from launch.failover import FailoverLearner
from launch.observe import TRAIN_SPAN, DrafterMeter, Observer, Span, StepDrafter, StepSpeculation
from models.config import ModelConfig, read_config
from policies.drafter.canary import Canary, CanaryVerdict
from policies.drafter.drift import DriftMonitor
from policies.drafter.lineage import micro_steps
from policies.drafter.payoff import TrainingPayoff
from policies.roofline.pace import Pace

_log = logging.getLogger(__name__)
Moment = Literal["sampled", "graded", "publishing"]
ENDS: dict[str, Moment] = {  # end of workers' spare time, by layout
    "embedded": "sampled",  # grading and learning need the same cores
    "colocated": "graded",  # grading needs no GPU, the learner needs theirs
    "disaggregated": "publishing",  # the learner has its own
}
_ANSWER_S = 5.0  # beyond a trainer's own deadline, after which it is killed
CHECKPOINTS_DIR = "drafter"  # in the run's folder


class DrafterTraining:
    """Drafter training of one run. Events come from the dispatcher's thread. Not thread-safe."""

    def __init__(
        self,
        config: Config,
        observer: Observer,
        run_dir: Path,
        model: ModelOptions,
        actors: DrafterActors,
        driver: DriverClient,
        watch: DrafterWatch,
        pace: Pace | None = None,
    ) -> None:
        options, self._pace = config.drafter, pace
        self._config, self._observer, self._run_dir, self._model = config, observer, run_dir, model
        self._actors, self._driver, self._watch = actors, driver, watch
        self.meter = DrafterMeter()
        self._drift = DriftMonitor(options.drift, options.every_steps)
        self._canary = Canary(options.canary)
        always = not options.while_it_pays or options.every_steps > 1 or options.drift > 0
        self.payoff = None if always else TrainingPayoff()
        self._ready: Weights | None = None  # the newest, not handed out yet
        self._kept: dict[int, Weights] = {}  # what engines draft with, and what they can roll back to
        self._drafting = 0  # version, of the engines
        self._workers: set[str] = set()
        self._without: set[str] = set()  # those of them whose engines have given the drafter up
        self._joined: set[str] = set()  # those of them that the coordinator does not know from its start
        self._drains: dict[str, tuple[Any, str]] = {}  # by node id: the coordinator's pending answer, and the reason
        self.trains = False  # workers without requests may train now
        self.yields = False  # ... but not in this RL step: they sample the next one early (rollout.lookahead)
        self._spare_time = False  # workers without requests have some: from `begin` to its end by layout
        self._recorded = True  # this RL step is, as it was when engines and learner started
        self._step = 0  # the RL step that samples, or sampled last
        self._trained = self._collapsed = False  # since the last record
        self._target_version = 0

    def plan(self, name: str, engine: EngineOptions) -> SpotPlan:
        """Return how worker `name`, which is about to start, trains."""
        options = self._config.drafter
        self._workers.add(name)
        self._actors.buffers.follow()
        if name not in self._actors.workers:
            self._joined.add(name)
            self._admit()
        path = self._config.rollout.speculation.eagle.path
        return SpotPlan(
            factory=partial(
                spawn_trainer,
                options,
                self._model,
                init=options.seed if path in (None, FRESH_WEIGHTS) else str(path),
                checkpoint_dir=str((self._run_dir / CHECKPOINTS_DIR).resolve()),
                name=f"{name}-trainer",
                threads=engine.threads,
                device=engine.device,
                start_timeout_s=self._config.cluster.start_timeout_s,
                pace=self._pace,
            ),
            endpoint=self._actors.endpoint,
            coordinator=self._config.coordinator,
            stop_timeout_s=options.stop_timeout_s,
            keys=self._actors.keys.worker(name),
        )

    def record_from(self, learner: FailoverLearner) -> None:
        """Have the learner's own pass record the hidden states, not the engines, if the configuration says so."""
        options = self._config.drafter
        if options.recording.source == "learner":
            learner.record_into(
                self._actors.buffers,
                max_bytes=options.recording.max_bytes_per_step,
                eagle3=options.algorithm == "eagle3",
                layers=options.layers or _recorded_layers(self._config),
                seed=options.seed,
            )

    def buffer_of(self, node_id: str) -> Any:
        """Return the data buffer of a node where a worker has come up."""
        return self._actors.buffers.of(node_id)

    # Around a rollout.

    def begin(self, step: int, dispatcher: RolloutDispatcher) -> None:
        """Begin the rollout of RL step `step`: workers without requests may train, if training is due. Hands out the
        newest weights first, since a trainer that stopped with the last rollout may have published after `hand_out`."""
        self._step, self._spare_time = step, True
        self._admit()
        self._hand_out(dispatcher)
        self.trains = self.due(step) and not self.yields
        self._driver.rollout_started(step, train=self.trains)

    def start_trainers(self, dispatcher: RolloutDispatcher) -> None:
        """Start all workers' trainers, if training has begun. Does not wait."""
        if self.begun:
            dispatcher.drafters.start_trainers()

    @property
    def begun(self) -> bool:
        """Whether workers have trainers: there was spare time enough for one, or training need not pay."""
        return self.payoff is None or self.payoff.begun

    @property
    def may_begin(self) -> bool:
        """Whether training may begin in this RL step, if workers stay without requests for long enough."""
        return self._spare_time and not self.begun and self._wanted

    def idle(self, seconds: Sequence[float], dispatcher: RolloutDispatcher) -> None:
        """Note for how long each worker without requests has had none since the rollout began. Training may begin."""
        needed = self._config.coordinator.threshold
        if not self.may_begin or len(seconds) < needed or self.payoff is None:
            return
        if not (news := self.payoff.idle(sorted(seconds, reverse=True)[needed - 1])):
            return
        self._observer.event("drafter_training", news)
        self.start_trainers(dispatcher)
        if self._recorded and self.due(self._step) and not self.yields:  # otherwise from the next rollout on
            self.trains = True
            self._driver.rollout_started(self._step, train=True)

    def due(self, step: int) -> bool:
        """Idle workers have something to learn in RL step `step`."""
        return self.records and self._wanted and self._drift.due(step)

    @property
    def records(self) -> bool:
        """Engines record for the next training: it is measured to pay, or not measured."""
        return self.payoff is None or self.payoff.trains

    def left(self, worker: str) -> None:
        """Forget a worker that has left for good."""
        for known in (self._workers, self._without, self._joined):
            known.discard(worker)

    def drain(self, node_id: str, reason: str) -> None:
        """Stop drafter training on this node. Does not wait."""
        self._drains[node_id] = self._actors.coordinator.drain.remote(node_id, reason), reason

    def undrain(self, node_id: str) -> None:
        """End the drain of a node, since it is gone or its notice was withdrawn."""
        self._drains.pop(node_id, None)
        self._actors.coordinator.undrain.remote(node_id)

    def _admit(self) -> None:
        """Send the joined workers and pending drains to the coordinator, in every RL step, since it may have restarted.
        Does not wait."""
        for worker in self._joined:
            self._actors.coordinator.admit.remote(worker)
        for node_id, (answer, reason) in list(self._drains.items()):
            ready, _ = ray.wait([answer], timeout=0)
            if not ready:
                continue
            try:
                ray.get(answer)
                del self._drains[node_id]  # The coordinator stores it, for its successors too.
            except RayError:
                self.drain(node_id, reason)

    def reached(self, moment: Moment, step: int) -> None:
        """End training if the RL step has reached the point where its resources are needed again. Does not wait."""
        if moment == ENDS[self._config.cluster.layout]:
            self.trains = self._spare_time = False
            self._driver.rollout_complete(step)

    def make_room(self, dispatcher: RolloutDispatcher) -> None:
        """Before the learner's turn in layout colocated: wait until trainers have left the workers' GPUs."""
        if self._config.cluster.layout == "colocated":
            within_s = self._config.drafter.stop_timeout_s + _ANSWER_S
            for name in dispatcher.drafters.stop_training(within_s):
                self._observer.event("trainer_late", f"{name}: its trainer may still use the GPU after {within_s:g} s")

    def hand_out(self, dispatcher: RolloutDispatcher, target_version: int) -> None:
        """Hand out drafter weights between two rollouts, together with the target's new weights."""
        if target_version != self._target_version:
            self._target_version = target_version
            self._canary.new_target()
        self._hand_out(dispatcher)

    def _hand_out(self, dispatcher: RolloutDispatcher) -> None:
        ready, self._ready = self._ready, None
        if ready is not None and self._accepted(ready.manifest.version):
            self._kept[ready.manifest.version] = ready
        wanted = self._kept.get(self._canary.version)
        if wanted is None or wanted.manifest.version == self._drafting:
            return
        dispatcher.drafters.update(TRAINED, wanted)
        self.meter.swapped(wanted.manifest.version)
        self._drafting = wanted.manifest.version
        self._kept = {v: kept for v, kept in self._kept.items() if v in (self._canary.good, self._drafting)}

    @property
    def _wanted(self) -> bool:
        """Whether any engine can draft with what is trained."""
        return self._workers != self._without

    @property
    def _based(self) -> bool:
        """Whether weights exist that new ones can be compared with and rolled back to."""
        return bool(self._kept.keys() & {self._canary.version, self._canary.good})

    def _accepted(self, version: int) -> bool:
        if self._based:
            return self._canary.offer(version)
        self._canary.trust(version)  # There is nothing to roll back to.
        return True

    # Events of others.

    def learned(self, result: StepResult) -> None:
        """Take the learner's result of an RL step, which may have recorded hidden states."""
        found = result.metrics
        self.meter.recorded(int(found.get("recording/bytes", 0)), found.get("recording/seconds", 0.0))

    def event(self, worker: str, event: DrafterEvent) -> None:
        match event:
            case DrafterFailed() | DrafterLoaded():
                self._told(worker, event)
                return
            case RecordingReport():
                self.meter.recorded(event.bytes, event.seconds, event.skipped)
                if event.failure:
                    self._observer.event(
                        "recording_failed", f"{worker}: {event.failure}; sequences are lost to training"
                    )
                return
            case MicroStep():
                self._trained = True
                end_s = event.started_s + event.seconds
                self._observer.span(Span(worker, TRAIN_SPAN, event.started_s, end_s, self._observer.current_step))
                self._observer.worker(worker, "training", f"micro-step {event.step}, loss {event.loss:.3f}")
            case TrainStopped(reason=reason) if reason:
                self._observer.event("trainer_stopped", f"{worker}: {reason}")
            case TrainFailed(reason):
                self._observer.event("trainer_lost", f"{worker}: {reason}")
            case TrainStopped() | Checkpointed():
                pass
            case _:
                assert_never(event)
        self.meter.event(worker, event)

    def published(self, worker: str, weights: Weights) -> None:
        """Take new weights of a trainer. They are stored where they outlive any worker."""
        version = weights.manifest.version
        if version == self._canary.version:  # what a trainer starts with
            self._kept.setdefault(version, weights)
        elif self._based and version <= self._canary.newest:
            _log.info("drafter version %d of %s was given up, or is older", version, worker)
        elif self._ready is None or version > self._ready.manifest.version:
            self._ready = weights
            self.meter.published(version)

    def _told(self, worker: str, event: DrafterFailed | DrafterLoaded) -> None:
        """Handle an engine that has lost the drafter, or has loaded new weights of it."""
        wanted = self._wanted
        if event.name != TRAINED:
            return
        if isinstance(event, DrafterFailed) and event.final:
            self._without.add(worker)
        elif isinstance(event, DrafterLoaded) and not event.reason:
            self._without.discard(worker)
        if wanted and not self._wanted:
            self._driver.rollout_complete(self._step)
            self._observer.event("drafter_given_up", "no engine can use it: its training ends")

    def window(self, window: EngineWindow) -> None:
        """Take an engine's counts of drafted and accepted tokens. Evaluations are skipped: their prompts and
        temperature differ, so they do not show how well the drafter works in RL."""
        if window.evaluation:
            return
        for use in window.strategies:
            if not use.drafted or Strategy.parse(use.strategy).drafter != TRAINED:
                continue
            self._drift.observe(use.strategy, use.drafted, use.accepted)
            good = self._canary.good
            verdict = self._canary.observe(self._drafting, use.strategy, use.drafted, use.accepted)
            if verdict is CanaryVerdict.ROLL_BACK:
                self._roll_back(good)
            elif verdict is CanaryVerdict.COLLAPSED:
                self._retrain("acceptance fell with the target's new weights")

    def _roll_back(self, good: int) -> None:
        """Give the engines version `good` again with the next target weights; trainers continue from it. Weights
        trained from the bad version belong to an abandoned lineage."""
        bad, returns = self._canary.rolled_back[-1], self._canary.version
        self._ready = None
        self.meter.rolled_back(bad)
        kept = self._kept.get(good)
        if kept is None:
            self._canary.trust(bad)
            self._retrain(
                f"version {micro_steps(bad)} drafts badly, and the weights before it were lost with a restart"
            )
            return
        self._driver.rollout_complete(self._step)  # Trainers at work now continue from the bad weights.
        self._kept[returns] = replace(kept, manifest=replace(kept.manifest, version=returns))
        self._observer.event(
            "drafter_rolled_back",
            f"version {micro_steps(bad)} drafts worse than version {micro_steps(good)}, which is restored",
        )

    def _retrain(self, why: str) -> None:
        self._collapsed = True
        self._drift.demand()
        if self.payoff is not None:
            self.payoff.demand()
        when = "retraining in the next RL step" if self.begun else "no worker is idle for long enough to train it"
        self._observer.event("drafter_collapsed", f"{why}: {when}")

    def take(self, step: int, step_s: float, speculation: StepSpeculation | None) -> StepDrafter:
        """Return the record of RL step `step`, which took `step_s` seconds."""
        if self._trained:
            self._drift.trained(step)
        if self._collapsed:  # this RL step's training began before the collapse
            self._drift.demand()
        self._trained = self._collapsed = False
        for node, stats in self._watch.look().items():
            self.meter.buffer(node, sequences=stats.sequences, bytes=stats.bytes)
        taken = self.meter.take(self._target_version, speculation)
        taken = taken if self.payoff is None else self._judged(self.payoff, step_s, taken)
        self._recorded = self.records
        return taken

    def _judged(self, payoff: TrainingPayoff, step_s: float, taken: StepDrafter) -> StepDrafter:
        """Decide by this RL step whether training goes on, and add what that is based on."""
        used, updates = taken.drafted, taken.updates
        accepted_s = 0.0 if used is None else used.seconds * used.accepted / max(used.accepted + used.request_steps, 1)
        right = [update.accuracy for update in updates if update.accuracy is not None]
        shared = self._config.cluster.layout == "embedded"  # with engines and the learner, outside a rollout's tail
        news = payoff.observe(
            stake_s=accepted_s,
            cost_s=taken.counts["recording_s"] + (taken.counts["cpu_s"] if shared else 0.0),
            step_s=step_s,
            accuracy=sum(right) / len(right) if right else None,
            acceptance=taken.acceptance,
        )
        if news:
            self._observer.event("drafter_training", news)
        worth = {} if payoff.worth_s is None else {"worth_s": payoff.worth_s, "cost_s": payoff.cost_s}
        return replace(taken, levels={**taken.levels, **worth})

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON. It belongs to the weights that `save` writes."""
        payoff = {} if self.payoff is None else {"payoff": self.payoff.state_dict()}
        return {"drift": self._drift.state_dict(), "canary": self._canary.state_dict(), **payoff}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drift.load_state_dict(state["drift"])
        self._canary.load_state_dict(state["canary"])
        if self.payoff is not None and "payoff" in state:
            self.payoff.load_state_dict(state["payoff"])

    def save(self, directory: Path) -> None:
        """Write the weights that may be handed out again. Raises OSError."""
        save_weights(directory, self._kept.values())

    def load(self, directory: Path) -> None:
        """Load what `save` wrote, as far as it is readable. Engines draft with it from the next `hand_out` on."""
        self._kept |= {weights.manifest.version: weights for weights in load_weights(directory)}
        if self._canary.version not in self._kept and self._canary.good in self._kept:
            self._canary.trust(self._canary.good)


def _recorded_layers(config: Config) -> tuple[int, int, int] | None:
    """Return the target layers that the drafter at rollout.speculation.eagle.path reads, if its files name them."""
    path = config.rollout.speculation.eagle.path
    if path is None or path == FRESH_WEIGHTS:
        return None
    found = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    if is_published(found):
        return read_published(path, ModelConfig.from_hf(read_config(config.model.path))).layers
    layers = found.get("layers")
    return (layers[0], layers[1], layers[2]) if layers else None


@contextmanager
def drafter_training(
    config: Config,
    observer: Observer,
    run_dir: Path,
    model: ModelOptions,
    avoid: Collection[str] = (),
    pace: Pace | None = None,
) -> Iterator[DrafterTraining | None]:
    """Run drafter training for the length of a job; None if `drafter.train` is false. `avoid`: ids of unused nodes.
    `pace`: of experiments."""
    if not config.drafter.train:
        yield None
        return
    with ExitStack() as stack:
        actors = stack.enter_context(drafter_actors(config, run_dir, avoid))
        driver = DriverClient(actors.endpoint, time.time_ns(), config.coordinator, keys=actors.keys.driver)
        stack.callback(driver.close)
        watch = DrafterWatch(actors.coordinator, actors.buffers.by_node, observer)
        stack.callback(watch.look)  # what was lost at the end is said too
        observer.event("coordinator", f"{actors.endpoint}; show it with: paceline status {run_dir}")
        yield DrafterTraining(config, observer, run_dir, model, actors, driver, watch, pace)
