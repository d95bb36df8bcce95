"""A whole RL run of one configuration in this process: `launch.run.rl_step` over an engine, a learner and a grader that
are called, not sent to.

Owns what stands in for the dispatcher, the learner group, the reward pool and the observer. Everything that decides
anything (prompt order, batches, budget, advantages, evaluations) is the program's own, so tokens, rewards and losses
are those of `paceline train` with the same configuration (`model.batch_invariant`, float32, as many learner threads).
Nothing is lost here, resumed or drafted for: what a run survives is no part of what it learns.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch

from actors.data.mixture import make_order
from actors.engine.batch.core import BatchCore
from actors.engine.native.core import build as build_engine
from actors.engine.wire import Start
from actors.environments.host import EnvironmentHost
from actors.learner_group import StepUnderWay
from actors.loop import EventLoop, Look
from actors.rewards import build
from actors.training.trainer import Trainer
from config.environments import EnvironmentOptions
from config.learner import OptimizerOptions
from config.speculation import SpeculationOptions
from contracts.engine import Submit, UpdateWeights
from contracts.environments import Answer, Call
from contracts.rollout import Finished, Rejected, Request
from contracts.training import Demonstration, StepResult, TrainSequence
from launch.batch import sampling_params
from launch.config import Config
from launch.config.paths import tokenizer_dir
from launch.context import RunContext
from launch.dispatch import DispatchStats, RolloutEnded
from launch.dispatch.ledger import FailedRequest
from launch.interrupt import Interrupt
from launch.observe import Sample, Span, StepRecord
from launch.run.collect import Collector
from launch.run.episodes import Player
from launch.run.evaluate import evaluate_job
from launch.run.inputs import load_inputs
from launch.run.job import Job, prompt_skip
from launch.run.phases import SharedMemory
from launch.run.publish import Publisher
from launch.run.rl_step import rl_step
from launch.run.token_budget import TokenBudget
from launch.run.train import due
from launch.run.warmup import warm_start
from models.manifest import WeightsManifest
from models.weights import Buffer
from policies.lengths import LengthModel

WORKER = "rollout-0"


@dataclass
class Record:
    """What a run told of itself; in place of the Observer."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # by RL steps done
    responses: dict[int, list[Sample]] = field(default_factory=dict)  # of training, by RL step
    events: list[tuple[str, str]] = field(default_factory=list)
    keep_responses: bool = False
    current_step: int = 0
    cpu_s: float = 0.0  # of this process in RL steps
    _since_s: float = 0.0

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)
        now_s = time.process_time()
        self.cpu_s, self._since_s = self.cpu_s + now_s - self._since_s, now_s

    def evaluation(
        self, step: int, metrics: Mapping[str, float], seconds: float = 0.0, *, printed: bool = True
    ) -> None:
        self.evaluations[step] = dict(metrics)
        self._since_s = time.process_time()

    def samples(self, step: int, samples: Sequence[Sample], *, held_out: bool = False) -> None:
        if self.keep_responses and not held_out:
            self.responses[step] = list(samples)

    def judged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def event(self, kind: str, message: str, **details: Any) -> None:
        self.events.append((kind, message))

    def span(self, span: Span) -> None:
        pass

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        pass

    def sync(self) -> None:
        pass


class Learner:
    """In place of LearnerGroup and FailoverLearner: one rank, called."""

    def __init__(self, config: Config, init: Literal["checkpoint", "random"] = "checkpoint") -> None:
        """The network at config.model.path, or fresh weights for its config.json."""
        if config.learner.ranks != 1:
            raise ValueError(f"learner.ranks is {config.learner.ranks}: one process is one rank")
        self.computes_with = f"this process, threads: {torch.get_num_threads()}"
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

    def begin_step(
        self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None
    ) -> StepUnderWay:
        """The work is done when its result is asked for: what is sampled meanwhile was begun before."""
        return StepUnderWay(lambda: self.train_step(sequences, step, asked=asked))

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        return self._trainer.sft_step(demonstrations)

    def reference_kl(self, sequences: Sequence[TrainSequence], step: int = 0) -> list[Any]:
        found = self._trainer.reference_kl(sequences, temperature=self._temperature)
        return [found[index] for index in range(len(sequences))]

    def publish(self, version: int, *, masters: bool = False) -> tuple[WeightsManifest, Buffer]:
        published = self._trainer.publish(version, masters=masters)
        assert published is not None
        return published

    def export(self, directory: str | Path) -> None:
        self._trainer.export(directory)

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


class Dispatcher:
    """In place of RolloutDispatcher: one engine, stepped until it has nothing left."""

    def __init__(self, config: Config, speculation: SpeculationOptions, loop: EventLoop) -> None:
        """The engine of a worker that serves config.model.path, drafting as `speculation` says."""
        self._loop = loop
        self._asked, self._open = set[int](), 0
        self._engine: BatchCore = build_engine(
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

    def set_weights(self, manifest: WeightsManifest, buffer: Buffer) -> int:
        self._engine.apply(UpdateWeights(manifest), buffer)
        return 1

    def unheard(self) -> AbstractContextManager[None]:
        return nullcontext()  # nobody waits to be heard

    def submit(self, request: Request) -> None:
        self._engine.apply(Submit((request,)), None)
        self._asked.add(request.request_id)
        self._open += 1

    def begin(self, requests: Sequence[Request]) -> None:
        self._begin_s, self._tokens, self._failed = time.monotonic(), 0, list[FailedRequest]()
        self._asked, self._open = set(), 0
        # Longest expected first, as the ledger hands them out.
        for request in sorted(requests, key=lambda r: (-r.expected_tokens, r.request_id)):
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
                    self._loop.tell(RolloutEnded(rollout))
                case Rejected(request_id=request_id, reason=reason):
                    self._failed.append(FailedRequest(request_id, reason))
                    self._open -= 1

    def end(self, *, abort: bool) -> DispatchStats:
        failed = self._failed
        done = len(self._asked) - len(failed)
        return DispatchStats(
            requests=len(self._asked),
            finished=done,
            failed=tuple(failed),
            reissued=0,
            lost_workers=0,
            duplicates=0,
            tokens=self._tokens,
            preempted=0,
            seconds=time.monotonic() - self._begin_s,
            sampled_by=dict.fromkeys(self._asked, WORKER),
            interrupted=abort,
        )


class Environments:
    """In place of EnvironmentPool: one process, awaited whenever somebody asks."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._loop, self._host, self._round = asyncio.new_event_loop(), EnvironmentHost(options), 0
        self._asked: dict[asyncio.Task[Answer], int] = {}

    def begin(self) -> None:
        self._round += 1

    def play(self, key: int, call: Call) -> None:
        self._asked[self._loop.create_task(self._host.play(replace(call, round=self._round)))] = key

    def look(self) -> list[tuple[int, Answer]]:
        """Whoever has answered: one is waited for."""
        if not self._asked:
            return []
        self._loop.run_until_complete(asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED))
        return [(self._asked.pop(task), task.result()) for task in list(self._asked) if task.done()]

    def close(self) -> None:
        self._loop.run_until_complete(self._host.close())
        self._loop.close()


OFF = SpeculationOptions(mode="off")


def train(config: Config, record: Record, *, speculation: SpeculationOptions = OFF) -> None:
    """Warm start (kept by the program's own cache), RL steps and evaluations; what happened is in `record`."""
    initial = initial_weights(config)
    with threads_of(config), open_job(config, record, initial, speculation=speculation) as job:
        job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
        job.publish()
        evaluate_job(job)
        while job.steps_done < config.run.steps:
            rl_step(job)
            if due(job.steps_done, config.eval.every, config.run.steps):
                evaluate_job(job)


def initial_weights(config: Config, log: Callable[[str], None] = lambda message: None) -> Path:
    """launch.run.warmup.warm_start with the learner of this process."""
    with threads_of(config):
        return warm_start(config, Interrupt(), lambda done, total: None, log, learner=_warm_learner)


@contextmanager
def _warm_learner(config: Config, init: Literal["checkpoint", "random"]) -> Iterator[Any]:
    learner = config.learner.model_copy(update={"lora": None})
    yield Learner(config.model_copy(update={"learner": learner}), init)


@contextmanager
def open_job(config: Config, record: Record, initial: Path, *, speculation: SpeculationOptions = OFF) -> Iterator[Job]:
    """launch.run.job.open_job without Ray: what decides is made as there."""
    path = {"path": str(initial), "tokenizer": tokenizer_dir(config)}
    config = config.model_copy(update={"model": config.model.model_copy(update=path)})
    inputs = load_inputs(config)
    context = RunContext(config=config, observer=cast(Any, record), interrupt=Interrupt(), run_dir=Path(config.run.dir))
    learner, dispatcher = cast(Any, Learner(config)), Dispatcher(config, speculation, context.loop)
    rewards, workers = build(config.reward), cast(Any, dispatcher)
    sampling = sampling_params(config.rollout.sampling, inputs.stop_tokens)
    lengths = LengthModel(config.rollout.sampling.max_new_tokens / 2)
    environments = None if config.environment is None else Environments(config.environment)
    player = None
    if config.environment is not None and environments is not None:
        player = Player(config.environment, environments, inputs.template)
    collector = Collector(context, workers, cast(Any, rewards), inputs.tokenizer, player=player)

    def react(event: Any) -> None:
        match event:
            case RolloutEnded(rollout):
                collector.ended(rollout)
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
            learner=learner,
            dispatcher=workers,
            publisher=Publisher(learner, workers, context),
            memory=SharedMemory(learner, workers, context),
            collector=collector,
        )
    finally:
        rewards.close()
        if environments is not None:
            environments.close()


@contextmanager
def threads_of(config: Config) -> Iterator[None]:
    """torch with the configuration's threads inside the block: they decide the order of sums. Raises ValueError if
    engine and learner want different ones, which this process cannot give them."""
    threads = config.learner.threads_of(1)
    if config.rollout.engine.threads != threads:
        raise ValueError(f"one process has the same threads throughout: set rollout.engine.threads={threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
