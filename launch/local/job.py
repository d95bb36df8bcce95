"""The parts of a run in one process without Ray: engine, learner, environments and grader are called directly.

Owns the stand-ins for the dispatcher, the learner group and the pools. All decisions (prompt order, batches, budget,
advantages, evaluations) are those of launch.run. So tokens, rewards and losses equal those of a run on Ray with the
same configuration (`model.batch_invariant`, float32, as many learner threads). Nothing is lost here and no drafter is
trained.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from actors.data.mixture import make_order
from actors.engine.native.core import build as build_engine
from actors.engine.process import NO_SPECULATION
from actors.engine.wire import Start
from actors.environments.host import EnvironmentHost
from actors.learner import PublishedDelta
from actors.loop import Look
from actors.observer import UNOBSERVED, RunObserver
from actors.rewards import build
from actors.training.trainer import Trainer
from config.environments import EnvironmentOptions
from config.learner import OptimizerOptions
from config.speculation import SpeculationOptions
from contracts.engine import Abort, Submit, UpdateWeights
from contracts.environments import EnvironmentAnswer, EnvironmentCall
from contracts.rollout import DrafterFailed, EngineWindow, Finished, Progress, Rejected, Request
from contracts.training import Demonstration, StepResult, TrainSequence
from launch.batch import sampling_params
from launch.config import Config
from launch.config.paths import tokenizer_dir
from launch.context import RunContext
from launch.dispatch import Deltas, DispatchStats, RolloutProgressed
from launch.dispatch.early import EarlySampling
from launch.dispatch.ledger import FailedRequest
from launch.errors import UsageError
from launch.interrupt import Interrupt
from launch.observe import Observer, SpeculationMeter
from launch.run.collect import Collector
from launch.run.deltas import DeltaChoice
from launch.run.episodes import Episodes
from launch.run.inputs import load_inputs
from launch.run.job import Job, prompt_skip
from launch.run.phases import SharedMemory
from launch.run.publish import Publisher
from launch.run.rounds import round_sampling
from launch.run.token_budget import TokenBudget
from launch.run.warmup import warm_start
from models.device import cpu_threads
from models.manifest import WeightsManifest
from models.weights import Buffer
from policies.lengths import LengthModel

WORKER = "rollout-0"


class LocalLearner:
    """Stands in for LearnerGroup and FailoverLearner: one rank, called directly."""

    home = ""
    delta: PublishedDelta | None = None

    def __init__(self, config: Config, init: Literal["checkpoint", "random"] = "checkpoint") -> None:
        """Load the network at config.model.path, or use fresh weights for its config.json."""
        if config.learner.ranks != 1:
            raise UsageError(f"learner.ranks is {config.learner.ranks}: one process is one rank")
        self.computes_with = f"this process, threads: {config.learner.threads_of(1)}"
        self.quantise_s = 0.0
        self._temperature = config.rollout.sampling.temperature
        self._trainer = Trainer(
            config.model,
            config.learner,
            config.objective,
            init=init,
            seed=config.run.seed,
            quantization=config.rollout.quantization,
            adapters_only=True,
        )

    def begin(self, optimizer: OptimizerOptions, total_steps: int) -> None:
        self._trainer.begin(optimizer, total_steps)

    def train_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> StepResult:
        return self._trainer.rl_step(sequences, temperature=self._temperature, asked=asked)

    def begin_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> None:
        """The work is done when its result is requested, so overlapping sampling began before."""
        self._sequences, self._step, self._asked = sequences, step, asked

    def step_result(self) -> StepResult:
        return self.train_step(self._sequences, self._step, asked=self._asked)

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        return self._trainer.sft_step(demonstrations)

    def reference_kl(self, sequences: Sequence[TrainSequence], step: int = 0) -> list[Any]:
        found = self._trainer.reference_kl(sequences, temperature=self._temperature)
        return [found[index] for index in range(len(sequences))]

    def publish(
        self, version: int, *, masters: bool = False, delta_share: float = 0.0
    ) -> tuple[WeightsManifest, Buffer]:
        """See LearnerGroup.publish. One process has nobody to send a delta to, so none is made."""
        published = self._trainer.weights.publish(version, masters=masters)
        assert published is not None
        return published

    def export(self, directory: str | Path) -> None:
        self._trainer.weights.export(directory)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        return {}, {}

    def rewind(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LocalDispatcher:
    """Stands in for RolloutDispatcher: one engine, stepped until it has nothing left."""

    by_delta = 0

    def __init__(
        self, context: RunContext, speculation: SpeculationOptions, meter: SpeculationMeter | None = None
    ) -> None:
        """Start the engine of a worker that serves config.model.path and drafts as `speculation` says."""
        config = context.config
        self.early = EarlySampling()
        self._asked, self._open = set[int](), 0
        self._watched: dict[int, int] | None = None  # tokens by request; None: not watched
        self._loop, self._observer, self._meter = context.loop, context.observer, meter
        self._engine = build_engine(
            Start(
                model=config.model,
                options=config.rollout.engine,
                seed=config.run.seed,
                weights_version=0,
                niceness=0,
                speculation=speculation,
                quantization=config.rollout.quantization,
                lora=config.learner.lora,
            )
        )

    def elsewhere(self, home: str) -> bool:
        return False

    def set_weights(self, manifest: WeightsManifest, buffer: Buffer, deltas: Deltas | None = None) -> int:
        self._engine.apply(UpdateWeights(manifest), buffer)
        return 1

    def unheard(self) -> AbstractContextManager[None]:
        return nullcontext()  # there is no silence to excuse

    def settle(self) -> None:
        """Nothing is in flight in one process."""

    def submit(self, request: Request) -> None:
        self._engine.apply(Submit((request,)), None)
        self._asked.add(request.request_id)
        self._open += 1

    def abort(self, request_ids: Iterable[int]) -> None:
        self._engine.apply(Abort(tuple(request_ids)), None)

    def begin(self, requests: Sequence[Request], *, watch: bool = False) -> None:
        self._watched = dict[int, int]() if watch else None
        self._begin_s, self._tokens, self._failed = time.monotonic(), 0, list[FailedRequest]()
        self._asked, self._open = set(), 0
        # Longest expected first, as the ledger hands them out.
        for request in sorted(self.early.begin(requests), key=lambda r: (-r.expected_tokens, r.request_id)):
            self.submit(request)

    @property
    def done(self) -> bool:
        return not (self._open or self._engine.has_work)

    def wait(self, until: Callable[[], bool]) -> None:
        while self._loop.told or not until():
            if not self.done:
                self._step()
            self._loop.turn()

    def _step(self) -> None:
        for event in self._engine.step():
            match event:
                case Finished(rollout=rollout):
                    self._tokens, self._open = self._tokens + len(rollout.tokens), self._open - 1
                    self.early.ended(rollout)
                    self._loop.tell(event)
                case Progress(request_id=request_id, delta=delta) if (watched := self._watched) is not None:
                    watched[request_id] = watched.get(request_id, 0) + len(delta)
                    self._loop.tell(RolloutProgressed(request_id, watched[request_id]))
                case Rejected(request_id=request_id, reason=reason):
                    self._failed.append(FailedRequest(request_id, reason))
                    self._open -= 1
                case EngineWindow() if not event.evaluation:
                    if event.early is not None:
                        self.early.used(event.early)
                    if self._meter is not None:
                        self._meter.window(WORKER, event)
                case DrafterFailed(name=name, reason=reason):
                    self._observer.event("drafter_failed", f"{WORKER}: {name} is no longer used: {reason}")

    def end(self, *, abort: bool) -> DispatchStats:
        return DispatchStats(
            requests=len(self._asked),
            finished=len(self._asked) - len(self._failed) - self._open,
            failed=tuple(self._failed),
            reissued=0,
            lost_workers=0,
            duplicates=0,
            tokens=self._tokens,
            preempted=0,
            seconds=time.monotonic() - self._begin_s,
            sampled_by=dict.fromkeys(self._asked, WORKER),
            interrupted=abort,
        )


class LocalEnvironments:
    """Stands in for EnvironmentPool: one process, waited for at every call."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._loop, self._host, self._round = asyncio.new_event_loop(), EnvironmentHost(options), 0
        self._asked: dict[asyncio.Task[EnvironmentAnswer], int] = {}

    def begin(self) -> None:
        self._round += 1

    def play(self, key: int, call: EnvironmentCall) -> None:
        self._asked[self._loop.create_task(self._host.play(replace(call, round=self._round)))] = key

    def look(self) -> list[tuple[int, EnvironmentAnswer]]:
        """Wait for one answer and return what has arrived."""
        if not self._asked:
            return []
        self._loop.run_until_complete(asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED))
        return [(self._asked.pop(task), task.result()) for task in list(self._asked) if task.done()]

    def close(self) -> None:
        """End the process. Calls under way, of a run that failed, are cancelled."""
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self._host.close()


def initial_weights(
    config: Config,
    observer: RunObserver = UNOBSERVED,
    interrupt: Interrupt | None = None,
) -> Path:
    """Do launch.run.warmup.warm_start with the learner of this process."""
    with threads_of(config):
        return warm_start(config, interrupt or Interrupt(), observer, learner=_warm_learner)


@contextmanager
def _warm_learner(config: Config, init: Literal["checkpoint", "random"]) -> Iterator[Any]:
    learner = config.learner.model_copy(update={"lora": None})
    yield LocalLearner(config.model_copy(update={"learner": learner}), init)


@contextmanager
def open_job(
    config: Config,
    observer: Observer,
    initial: Path,
    *,
    speculation: SpeculationOptions = NO_SPECULATION,
    interrupt: Interrupt | None = None,
) -> Iterator[Job]:
    """Do launch.run.opening.open_job without Ray; all decisions are made as there. Raises UsageError for
    several ranks."""
    path = {"path": str(initial), "tokenizer": tokenizer_dir(config)}
    config = config.model_copy(update={"model": config.model.model_copy(update=path)})
    inputs = load_inputs(config)
    context = RunContext(
        config=config,
        observer=observer,
        interrupt=Interrupt() if interrupt is None else interrupt,  # false until a stop is requested
        run_dir=Path(config.run.dir) / config.run.name,
    )
    meter = SpeculationMeter() if speculation.mode != "off" else None
    learner = cast(Any, LocalLearner(config))
    dispatcher = cast(Any, LocalDispatcher(context, speculation, meter))
    rewards = build(config.reward)
    sampling = sampling_params(config.rollout.sampling, inputs.stop_tokens)
    lengths = LengthModel(config.rollout.sampling.max_new_tokens / 2)
    environments = None if config.environment is None else LocalEnvironments(config.environment)
    episodes = None
    if config.environment is not None and environments is not None:
        episodes = Episodes(config.environment, cast(Any, environments), inputs.template)
    collector = Collector(context, dispatcher, cast(Any, rewards), inputs.tokenizer, episodes=episodes)

    def react(event: Any) -> None:
        match event:
            case Finished(rollout):
                collector.ended(rollout)
            case RolloutProgressed(request_id, tokens):
                collector.progressed(request_id, tokens)
            case Look() if environments is not None:
                collector.answered(environments.look())

    context.loop.react_with(react)
    try:
        yield Job(
            context=context,
            tokenizer=inputs.tokenizer,
            prompts=inputs.prompts,
            held_out=inputs.held_out,
            sampling=sampling,
            stop=inputs.stop,
            order=make_order(inputs.prompts, config.run.seed, config.data.shuffle),
            lengths=lengths,
            budget=TokenBudget(config, inputs.stop, inputs.answer),
            skip=prompt_skip(config, inputs.prompts),
            rounds=round_sampling(config, inputs.prompts),
            learner=learner,
            dispatcher=dispatcher,
            publisher=Publisher(learner, dispatcher, context, DeltaChoice("never", observer)),
            memory=SharedMemory(learner, dispatcher, context),
            speculation=meter,
            collector=collector,
        )
    finally:
        rewards.close()
        if environments is not None:
            environments.close()


@contextmanager
def threads_of(config: Config) -> Iterator[None]:
    """Set torch to the configuration's threads inside the block, since they decide the order of sums. Raises UsageError
    if engine and learner want different numbers, which one process cannot have."""
    threads = config.learner.threads_of(1)
    if config.rollout.engine.threads not in (None, threads):
        raise UsageError(
            "one process has the same threads throughout, but learner.threads and rollout.engine.threads differ",
            remedy=f"set rollout.engine.threads={threads}, or learner.threads={config.rollout.engine.threads}",
        )
    with cpu_threads(threads):
        yield
