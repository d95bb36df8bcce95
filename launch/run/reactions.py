"""The reaction to each event of a run: all of the driver's control flow besides the RL step itself.

Every wait of the driver runs the event loop (actors.loop), and every event arrives here, in order.
"""

from operator import attrgetter
from typing import assert_never

from actors.environment_worker import EnvironmentArrived, EnvironmentPool
from actors.learner_group import RanksAwaited
from actors.loop import Look
from actors.reward_pool import GradesArrived, RewardPool
from actors.spot_host import DrafterEvent
from contracts.rollout import EngineWindow, Finished, PassEvent
from launch.calibrations import CalibrationStore
from launch.cluster.versions import NodeRefused, NodeVersions, RefusedGone
from launch.dispatch import (
    DispatchEvent,
    RolloutProgressed,
    Weights,
    WeightsGone,
    WorkerArrived,
    WorkerChanged,
    WorkerNews,
    WorkerUp,
)
from launch.failover import (
    LearnerEvent,
    LearnerNews,
    WeightsRenewed,
)
from launch.fleet import Fleet
from launch.fleet.feed import Heard
from launch.fleet.notices import CheckpointWanted
from launch.observe import Observer
from launch.run.checkpoints import save_first
from launch.run.job import Job

Event = (
    DispatchEvent
    | LearnerEvent
    | RanksAwaited
    | GradesArrived
    | EnvironmentArrived
    | Heard
    | NodeRefused
    | RefusedGone
    | CheckpointWanted
    | Look
)

WORKER_STATES = {  # the displayed state of a worker after an event of this kind
    "worker_joined": "idle",
    "worker_left": "left",
    "worker_lost": "restart",
    "worker_restarted": "idle",
    "worker_dead": "lost",
}


class Reactions:
    """Reactions of one run to the events of all its parts."""

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        rewards: RewardPool,
        environments: EnvironmentPool | None,
        versions: NodeVersions,
        calibrations: CalibrationStore,
    ) -> None:
        self._job, self._fleet, self._loop, self._observer = job, fleet, job.context.loop, job.observer
        self._rewards, self._environments = rewards, environments
        self._versions, self._calibrations = versions, calibrations
        self._started = False

    def started(self) -> None:
        """The workers that the run needs to begin are up. From now on others join and leave."""
        self._started = True
        for node_id, reason in self._versions.refused.items():
            self._fleet.drain(node_id, reason)

    def __call__(self, event: Event) -> None:
        """React to an event. Raises what ends the run or the driver's wait."""
        job, dispatcher, drafter = self._job, self._job.dispatcher, self._job.drafter
        match event:
            # Events of Ray.
            case WorkerArrived():
                if self._hears_workers:
                    dispatcher.receive(event)
                else:
                    self._loop.hold(event)
            case GradesArrived():
                self._rewards.receive(event)
            case EnvironmentArrived():
                if self._environments is not None:
                    job.collector.answered(self._environments.receive(event))
            # Events of workers.
            case Finished(rollout):
                job.collector.ended(rollout)
            case RolloutProgressed(request_id, tokens):
                job.collector.progressed(request_id, tokens)
            case WorkerNews(worker, news):
                self._news(worker, news)
            case WorkerChanged(kind, worker, message):
                self._observer.event(kind, f"{worker}: {message}")
                show_worker(self._observer, kind, worker, message)
                if kind == "worker_left" and drafter is not None:
                    drafter.left(worker)
            case WorkerUp(seat):
                if drafter is not None:
                    dispatcher.drafters.use_buffer(seat, drafter.buffer_of(seat.node_id))
            case WeightsGone():
                with dispatcher.unheard():
                    renewed = job.memory.renew()
                if not renewed:
                    dispatcher.give_up(event)
            # Events of the learner.
            case RanksAwaited(waited_s):
                job.learner.awaited(waited_s)
            case LearnerNews.STARTS:
                self._fleet.hold_back(True)
            case LearnerNews.STARTED:
                self._fleet.hold_back(False)
            case LearnerNews.WAITS:
                self._fleet.make_way()
            case LearnerNews.REPEATS:
                job.memory.learn()
            case WeightsRenewed(manifest, ref):
                dispatcher.renew_weights(manifest, ref)
            # Events of nodes.
            case Heard():
                if job.notices is not None:
                    job.notices.hear(event)
            case NodeRefused(node_id, reason):
                self._fleet.drain(node_id, reason)
            case RefusedGone(node_id):
                self._fleet.forget(node_id)
            case CheckpointWanted():
                if job.notices is not None and save_first(job):
                    job.notices.saved()
            case Look():
                self._look()
            case _:
                assert_never(event)

    @property
    def _hears_workers(self) -> bool:
        """Whether to handle lost and started workers now. True while the driver waits for workers, or if starting
        engines takes no memory from a working learner."""
        return self._job.dispatcher.listening or self._fleet.startable

    def _look(self) -> None:
        """Check what is due: late workers, joins and leaves, losses that nothing waited for."""
        if self._hears_workers:
            self._job.dispatcher.look()
        self._rewards.look()
        if self._environments is not None:
            self._job.collector.answered(self._environments.look())
        if not self._started:
            return
        for change in self._versions.look():
            self._loop.tell(change)
        if self._job.notices is not None:
            self._job.notices.look()
        self._fleet.look()
        self._job.memory.look()
        if self._observer.fleet_due():
            self._observer.fleet(self._fleet.state.counts())

    def _news(self, worker: str, news: EngineWindow | PassEvent | DrafterEvent | Weights) -> None:
        drafter = self._job.drafter
        match news:
            case EngineWindow():
                self._sampled(worker, news)
            case PassEvent():
                self._calibrations.heard(worker, news)
            case Weights():
                if drafter is not None:
                    drafter.published(worker, news)
            case _:
                if drafter is not None:
                    drafter.event(worker, news)

    def _sampled(self, worker: str, window: EngineWindow) -> None:
        self._fleet.window(window)
        if self._job.drafter is not None:
            self._job.drafter.window(window)
        if self._job.speculation is not None and not window.evaluation:
            self._job.speculation.window(worker, window)
        show_window(self._observer, worker, window, strategies=self._job.speculation is not None)


def show_worker(observer: Observer, kind: str, worker: str, detail: str) -> None:
    """Show what happened to a worker as its state, since an absent worker reports nothing itself."""
    if kind in WORKER_STATES:
        observer.worker(worker, WORKER_STATES[kind], detail)
        observer.load(worker, running=0, waiting=0, kv_tokens=0)


def show_window(observer: Observer, worker: str, window: EngineWindow, *, strategies: bool) -> None:
    detail = f"{window.running} running, {window.waiting} waiting"
    if strategies and window.running and window.strategies:
        detail += f", {max(window.strategies, key=attrgetter('engine_steps')).strategy}"
    observer.worker(worker, "decode" if window.running else "idle", detail)
    observer.load(worker, running=window.running, waiting=window.waiting, kv_tokens=window.kv_tokens_used)
